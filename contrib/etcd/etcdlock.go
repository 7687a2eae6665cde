// Package etcdlock makes the locks of package lock on etcd: locks, read-write locks and semaphores that are fair, with
// fencing tokens.
//
//	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{"localhost:2379"}})
//	...
//	locks, err := etcdlock.New(ctx, etcd)
//	...
//	defer locks.Close()
//	err = locks.Lock("orders").Do(ctx, ship)
//
// The caller makes and configures the client of etcd, and closes it after [driver.Client.Close]. The server should be
// etcd 3.5.13 or later: before, a leader that had been cut off or slow could confirm the renewal of a lease that the others
// let expire, or revoke one that the others had renewed. Since 3.5.16 it can still do so in the moment in which its whole
// process, or its virtual machine, goes on after a pause that was longer than the TTL.
//
// # Guarantees
//
// A hold is a key that begins with the prefix and the name, escaped as in a URL, and so is a call that waits. The keys of a
// name are a queue, in the order of their create revisions, and the lock belongs to the first. The create revision is also
// the fencing token (see lock.Hold.Token), so tokens grow in the order in which holds begin. The value of a key is the owner
// (see lock.OwnerOf):
//
//	etcdctl get --prefix redlatch/orders, --sort-by=CREATE
//
// All keys of a client have one lease, which it renews each third of its TTL (see [WithTTL]). If the process dies its
// locks become free after the TTL. A hold is lost, and its context ends, before etcd can let the lease expire: the TTL counts
// from the time at which the last confirmed renewal was sent, by the monotonic clock. With each renewal the client also asks
// which keys the lease has, so that a hold whose key was deleted by hand is lost after a third of the TTL.
//
// The guarantee ends where the guarantee of any lease ends: a process can be paused between its look at the context and its write.
// Where that matters, write to etcd in a transaction with [Client.IsOwner], or have another resource refuse a token that
// is less than one it has seen.
//
// Revisions, and with them tokens, begin anew in a new cluster. A cluster that is restored from a snapshot goes back to
// the revision of the snapshot, unless "etcdutl snapshot restore" gets --bump-revision and --mark-compacted.
//
// # What is there
//
//	Lock, TryLock, Do, Wait, Parent, FailFast, MaxWaiters    yes
//	order of waiters                                         of all processes, as they came
//	fencing tokens                                           yes; also of read locks and permits
//	read-write locks                                         yes; a reader does not overtake a writer that waits
//	semaphores                                               yes; all processes must use the same number of permits
//	re-entry by lock.WithOwner                               yes
//	MaxHold, AtLeast                                         yes; AtLeast ends with the process
//	Lease, Extend                                            yes, by a lease of etcd for this hold, in two more requests
//	context of a hold, LostError, Holds, Shutdown            yes
//	Detach and Adopt                                         no
//	ForceUnlock                                              no; delete the key, with etcdctl for example
//	locks of several locks, latches, rate limiters           no
//	elections                                                no; a lock that is held for ever is one, and package
//	                                                         concurrency of etcd has one with a value to observe
//
// A hold with a lock.Lease, and one that was extended by more than the TTL, has a lease of its own. etcd measures leases
// in whole seconds and grants at least two, by default: if the process dies the key stays for as long. The hold itself
// ends in time. A hold with a lock.Lease is not renewed: that its key was deleted by hand shows in Extend and Unlock.
//
// # The mutex of etcd
//
// Package concurrency, of the client of etcd, has a Mutex, which takes a lock by the same queue. A program that uses it has to
// take care of what this package does:
//
//   - A session that has expired ends a channel, which each holder has to watch, and the lock is not told. The
//     channel closes when the client notices, which can be after others have the lock, because the lease is counted
//     from the receipt of a reply.
//   - A call that waits does not notice that its session has expired until all others ahead of it have gone.
//   - Unlock does not tell whether the lock was held. If it fails, the key stays as long as the session.
//   - Lock that has lost a reply fails, and its key stays in the queue as long as the session, and keeps others waiting.
//   - TryLock joins the queue and leaves it again. Meanwhile it is in the way of others that try.
//   - Two calls with one session hold the lock together, as if they were one.
//   - A watch on a member that hangs waits for ever, unless the connections of the client have a keep-alive.
//   - A lock that was released before the watch began is passed on with a delay, which is 40 ms on average.
//   - There is a transaction condition, IsOwner, as here, and the revision of the key can serve as a token, but is not
//     called one.
//
// Mutex has two advantages: it needs no goroutine besides the one of its session, and a process can continue the session of
// another one by its lease.
//
// # Members that hang
//
// A member that is cut off from the others hangs for the time of an election, and then refuses requests, which go to
// another member. One that hangs for longer, with its connections open, costs each request that it gets a timeout: a fifth
// of the TTL, and at most two seconds. The request then goes to two members at once, one of which answers if only one hangs.
// The client of etcd does not notice by itself: set DialKeepAliveTime and DialKeepAliveTimeout in its configuration. A call
// that waits checks twice per TTL that its watch has missed nothing, and else watches by another connection. So a waiter
// may get its lock half a TTL late then, and with lock.FailFast notices as late that etcd cannot be asked any more.
//
// # Errors
//
// They are as in package lock. Requests that etcd refuses because it has no leader, too many requests, or no valid
// credentials match lock.ErrUnavailable, and Lock repeats them. Others return what etcd says, such as rpctypes.ErrNoSpace and
// rpctypes.ErrPermissionDenied: rights for the prefix are required, to read and to write.
//
// With a user name and a password the client of etcd logs in for each renewal, which costs etcd some 100 ms of a processor. A
// longer TTL, or a certificate instead of a password, avoids that.
package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Option configures a Client. nil is invalid.
type Option func(*config) error

type config struct {
	ttl    time.Duration
	prefix string
	driver []driver.Option
}

const (
	defaultTTL    = 10 * time.Second
	defaultPrefix = "redlatch/"
	minTTL        = 2 * time.Second
	maxTTL        = time.Hour
)

// WithTTL sets the TTL of the lease that the client renews: how long a lock stays when its process has died, and how long
// an outage of etcd may last without the loss of holds. It must be from 2 seconds, the least that etcd grants by default, to
// an hour, and is rounded up to whole seconds. The default is 10 seconds.
func WithTTL(d time.Duration) Option {
	return func(c *config) error {
		if d < minTTL || d > maxTTL {
			return fmt.Errorf("%w: WithTTL(%v): must be from %v to %v", lock.ErrInvalid, d, minTTL, maxTTL)
		}
		c.ttl = d
		return nil
	}
}

// WithPrefix sets what all keys begin with. It must end with a slash, or be empty, and contain no comma. Clients with different
// prefixes have different locks. The default is "redlatch/".
func WithPrefix(prefix string) Option {
	return func(c *config) error {
		if prefix != "" && !strings.HasSuffix(prefix, "/") || strings.Contains(prefix, ",") {
			return fmt.Errorf("%w: WithPrefix(%q): must end with a slash, and contain no comma", lock.ErrInvalid, prefix)
		}
		c.prefix = prefix
		return nil
	}
}

// WithDriver sets options of package driver, such as driver.WithLogger.
func WithDriver(opts ...driver.Option) Option {
	return func(c *config) error { c.driver = append(c.driver, opts...); return nil }
}

// Client makes locks on etcd. Its methods are those of driver.Client, and safe for concurrent use.
type Client struct {
	*driver.Client
	s *store
}

// New returns a client that makes its requests with c, when etcd has granted it a lease. It tries once for each endpoint,
// until ctx ends; the error then matches lock.ErrUnavailable. It matches lock.ErrInvalid if an option is invalid. c must not
// be closed before the client is.
func New(ctx context.Context, c *clientv3.Client, opts ...Option) (*Client, error) {
	began := time.Now()
	failed := func(err error) error {
		e := &lock.Error{Op: "connect", Kind: "client", Err: err}
		if c != nil {
			e.Name = strings.Join(c.Endpoints(), ",")
		}
		if !errors.Is(err, lock.ErrInvalid) {
			e.Waited = time.Since(began)
		}
		return e
	}

	cfg := config{ttl: defaultTTL, prefix: defaultPrefix}
	if c == nil || ctx == nil {
		return nil, failed(fmt.Errorf("%w: the client of etcd, or the context, is nil", lock.ErrInvalid))
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, failed(fmt.Errorf("%w: a nil option", lock.ErrInvalid))
		}
		if err := opt(&cfg); err != nil {
			return nil, failed(err)
		}
	}

	s := newStore(c, cfg)
	l, err := s.grant(ctx, true, s.ttl)
	if err != nil {
		s.cancel()
		if ctx.Err() != nil {
			err = errors.Join(err, context.Cause(ctx))
		}
		return nil, failed(err)
	}
	s.useLocked(l) // nothing else uses it yet
	s.work.Go(s.run)
	return &Client{driver.NewClient(s, cfg.driver...), s}, nil
}

// IsOwner returns a condition for a transaction of etcd. The transaction succeeds only if the lock, or the permit, of h is
// held when etcd executes it, and if h is not unlocked or lost before IsOwner is called. h must be a hold of this client.
//
//	resp, err := etcd.Txn(ctx).If(locks.IsOwner(h)).Then(clientv3.OpPut("orders/7", "shipped")).Commit()
func (c *Client) IsOwner(h lock.Hold) clientv3.Cmp {
	held := h != nil && h.Remaining() > 0 // lock.AtLeast keeps the key longer
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if cl := c.s.owners[lock.OwnerOf(h)]; held && cl != nil && cl.held {
		return clientv3.Compare(clientv3.CreateRevision(cl.key), "=", cl.rev)
	}
	return clientv3.Compare(clientv3.CreateRevision("\x00"), "=", -1) // never
}
