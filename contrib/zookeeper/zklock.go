// Package zklock makes the locks of package lock on ZooKeeper: locks, read-write locks and semaphores, on a connection of
// the program (github.com/go-zookeeper/zk).
//
//	session := zklock.NewSession(nil)
//	conn, events, err := zk.Connect(servers, 10*time.Second, zk.WithDialer(session.Dial))
//	...
//	defer conn.Close()
//	client, err := zklock.New(ctx, conn, session)
//	...
//	defer client.Close()
//	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error { ... })
//
// The connection is the program's: its servers, options, credentials and events. Only its dialer is a [Session], because
// go-zookeeper does not say which timeout the server has granted, nor when a session begins and ends. Close the client
// before the connection.
//
// # What there is
//
//	lock, read-write lock, semaphore   yes; a lock is the write side of the read-write lock of its name, and a semaphore
//	                                   has 10,000 permits at most
//	order                              waiters of all clients acquire in the order in which they came; readers pass
//	                                   readers that are ahead, and no writer
//	fencing tokens                     yes, see below
//	re-entry by lock.WithOwner         yes
//	lock.Lease                         yes: this process releases the lock; if it dies or has no connection, the lock is
//	                                   free when the session ends
//	Extend                             yes: it asks whether the lock is there, and moves the end of a Lease
//	lock.AtLeast                       yes, as long as this process lives
//	lock.MaxWaiters                    yes, among the callers of this client
//	lock.Detach                        no: a lock belongs to its session
//	force unlock                       by hand: remove the node. Others have the lock at once, and the hold is lost, with
//	                                   lock.ReasonGone, up to a fifth of the session timeout later
//	other libraries                    no: the recipes of Curator and go-zookeeper do not see these locks
//
// # What is stored
//
// A claim, which is held or waits, is an ephemeral sequential node without data. Its name contains the owner:
//
//	/redlatch/locks/NAME/write_OWNER_ATTEMPT_SEQUENCE
//
// Characters that ZooKeeper does not permit in a path, "/" and "%" are escaped in NAME as in URLs. The folders are
// containers: the servers remove them when they have been empty for about a minute. This takes ZooKeeper 3.5 or later.
// Nothing else stays.
//
// An acquisition of a lock that is free is one write, and so is a release. A waiter watches the node before its own, so
// that a release wakes one waiter. The waiter of a semaphore watches as many nodes as there are permits. A waiter asks
// for the nodes ahead of it when it has queued, and when the node that it watches goes away while others are ahead. It
// watches its node again after each reconnect, because no server has to take over watches.
// TryLock on a lock that others hold is two writes: it queues, looks, and leaves. It may find another such call there,
// and then fails although nobody holds the lock.
//
// # When a hold ends
//
// All holds and waiters of a client share the session of its connection. While there are some, the client confirms the
// session five times in a session timeout, by a transaction that checks their nodes and changes nothing. A majority of
// the servers has to agree to that. Pings and questions are no confirmation: a server answers them even if the others
// have gone on without it.
//
// Each hold is lost three quarters of the session timeout after the latest confirmed transaction was sent, by the
// monotonic clock: its context ends with a [*lock.LostError]. The servers give the lock to others when the session
// timeout is over. If the session survives after all, the client releases the lost holds. A server that does not answer
// such a transaction within a fifth of the timeout, or a second, is left for another one: zklock closes the connection,
// and go-zookeeper makes the next.
//
// The last quarter is for the leader, which ends the sessions. Other servers tell it twice a tick which sessions are
// alive. The shortest session timeout is two ticks, unless an administrator has changed that, so a quarter is half a tick
// at least. A leader that pauses for longer than the rest of the quarter can end a session early. The
// session timeout should therefore be five ticks or more: 10 s with the default tick of 2 s. As with every lease, work
// that must stay correct passes the fencing token to a resource that checks it.
//
// All holds are lost at once if the server says that the session has ended, or if the program closes the connection.
// Waiters queue again with the next session. A program that closes a connection without a server sends nothing: holds are
// lost when their time is over, and calls that wait fail a second later.
//
// # Servers that have missed transactions
//
// A server of ZooKeeper 3.8.0 that was killed can start again without some of the transactions that the others have. It then
// shows nodes for ever that were removed. With each confirmation of the session, five times in its timeout, the client
// also asks whether the nodes exist that its calls wait for. If a majority says no and the server shows the node, the client
// leaves it for the next server. TryLock does not wait, and fails on such a server, although the lock is free.
//
// # Fencing tokens
//
// The token of a hold is the id of the transaction that has created its node (czxid). It grows from each holder to the
// next, over restarts and elections, as long as the servers keep their data. It takes 64 bits: an ensemble has ids beyond
// 2^32.
package zklock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Client makes the locks of one process on ZooKeeper. Its methods are safe for concurrent use.
type Client struct{ *driver.Client }

// Option configures a Client.
type Option func(*config) error

type config struct {
	prefix string
	acl    []zk.ACL
	client []driver.Option
}

// DefaultPrefix is the path of the nodes without WithPrefix.
const DefaultPrefix = "/redlatch"

// WithPrefix sets the path below which the nodes are. It must be absolute and not the root. Folders that are missing are
// created as containers. Clients with different prefixes have different locks.
func WithPrefix(path string) Option {
	return func(c *config) error {
		if err := checkPrefix(path); err != nil {
			return err
		}
		c.prefix = path
		return nil
	}
}

func checkPrefix(path string) error {
	rest, absolute := strings.CutPrefix(path, "/")
	if !absolute {
		return fmt.Errorf("the prefix %q does not begin with /", path)
	}
	for part := range strings.SplitSeq(rest, "/") {
		if part == "" || part != escape(part) {
			return fmt.Errorf("the prefix %q: %q cannot be a part of it", path, part)
		}
	}
	return nil
}

// WithACL sets the access control list of new nodes and folders. Clients need all rights but ADMIN on them. The default
// gives all rights to everybody. Credentials are the connection's: see zk.Conn.AddAuth.
func WithACL(acl []zk.ACL) Option {
	return func(c *config) error {
		if len(acl) == 0 {
			return errors.New("the access control list is empty: nobody had any rights")
		}
		c.acl = acl
		return nil
	}
}

// WithClientOptions sets options of package driver, such as driver.WithLogger.
func WithClientOptions(opts ...driver.Option) Option {
	return func(c *config) error {
		c.client = append(c.client, opts...)
		return nil
	}
}

// New returns a client on a connection whose dialer is session.Dial. It blocks until the connection has a session, and
// sends nothing itself. The error matches lock.ErrUnavailable if ctx ends first, and lock.ErrInvalid for invalid
// arguments, such as a Session that observes another connection. Close the client before the connection.
func New(ctx context.Context, conn *zk.Conn, session *Session, opts ...Option) (*Client, error) {
	began := time.Now()
	c := config{prefix: DefaultPrefix, acl: zk.WorldACL(zk.PermAll)}
	if conn == nil || session == nil {
		return nil, refused(began, fmt.Errorf("%w: the connection or the session is nil", lock.ErrInvalid))
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, refused(began, fmt.Errorf("%w: a nil option", lock.ErrInvalid))
		}
		if err := opt(&c); err != nil {
			return nil, refused(began, fmt.Errorf("%w: %w", lock.ErrInvalid, err))
		}
	}

	if err := session.await(ctx, conn); err != nil {
		return nil, refused(began, err)
	}
	return &Client{driver.NewClient(newStore(conn, session, c.prefix, c.acl), c.client...)}, nil
}

func refused(began time.Time, err error) error {
	return &lock.Error{Op: "connect", Kind: "client", Waited: time.Since(began), Err: err}
}

// await blocks until conn has a session that s observes.
func (s *Session) await(ctx context.Context, conn *zk.Conn) error {
	for mismatches := 0; ; {
		now, changed := s.state()
		if now.closed {
			return errDisconnected
		}
		id := conn.SessionID()
		if now.connected && id == now.id {
			return nil
		}

		// The connection has the id a moment after s.
		if id != 0 && id != now.id {
			mismatches++
			if mismatches > maxMismatches {
				return fmt.Errorf("%w: the dialer of the connection is not the Dial of the session", lock.ErrInvalid)
			}
		}
		var later <-chan time.Time
		if now.connected || id != 0 {
			later = time.After(10 * time.Millisecond)
		}
		select {
		case <-later:
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: there was no connection to ZooKeeper yet: %w", lock.ErrUnavailable, context.Cause(ctx))
		}
	}
}

// maxMismatches bounds how often New looks whether a connection and a Session have the same session.
const maxMismatches = 100
