package redlatch

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/rlock"
	"github.com/redlatch/redlatch/rwlock"
	"github.com/redlatch/redlatch/semaphore"
)

// Client hands out every object and owns what they share: the connection, the
// pub/sub hub, the watchdog and the identity of their owners. A process usually
// has one. Its methods may be called concurrently.
type Client struct {
	conn  rueidis.Client
	owned bool
	s     *session.Session
}

// Open connects to the servers at the given URLs. The schemes are redis,
// rediss (TLS), valkey, valkeys and unix; the forms are those of
// [rueidis.ParseURL]. Several URLs, or several addr parameters in one, are
// nodes of one cluster; the parameter master_set makes them sentinels. Settings
// other than the address are taken from the first URL.
//
// It blocks until the server has answered and fails if none does, or ctx ends
// first, and then looks at the servers for two seconds at most and logs what locks
// would suffer from (see WithoutStartupChecks). For options use New with
// [ParseURL].
func Open(ctx context.Context, urls ...string) (*Client, error) {
	opt, err := ParseURL(urls...)
	if err != nil {
		return nil, err
	}
	return New(ctx, opt)
}

// ParseURL turns the URLs that Open takes into options for New. It returns an
// error that matches lock.ErrInvalid if one of them is wrong, or none is given.
func ParseURL(urls ...string) (rueidis.ClientOption, error) {
	var opt rueidis.ClientOption
	if len(urls) == 0 {
		return opt, fmt.Errorf("%w: no server URL", lock.ErrInvalid)
	}
	for i, url := range urls {
		o, err := rueidis.ParseURL(url)
		if err != nil {
			// Not the URL itself: it may hold a password.
			return rueidis.ClientOption{}, fmt.Errorf("%w: server URL number %d: %v", lock.ErrInvalid, i+1, withoutURL(err, url))
		}
		if i == 0 {
			opt = o
		} else {
			opt.InitAddress = append(opt.InitAddress, o.InitAddress...)
		}
	}
	return opt, nil
}

func withoutURL(err error, url string) string {
	return strings.ReplaceAll(err.Error(), url, "(the URL)")
}

// Defaults for connections that New makes, where they differ from those of
// rueidis.
const (
	// A server that does not answer for this long is given up, on a connection or
	// on the way to one: well under a third of the default lease.
	defaultResponseTimeout = 3 * time.Second
	// A connection that takes longer to notice that nobody answers, or of which
	// that is not known, is not waited for.
	maxResponseTimeout  = 5 * time.Second
	defaultRedirections = 16
	sentinelRefresh     = 5 * time.Second
)

// New connects as opt says and returns a client that owns the connection. It
// blocks until the server has answered and fails if none does, or ctx ends
// first. Where opt leaves a field at its zero value, New chooses what suits
// locks: timeouts of 3 s for responses (ConnWriteTimeout) and for connecting
// (Dialer.Timeout, and that of Sentinel), one connection for pipelined commands
// (PipelineMultiplex), a bound on redirections, a regular look at the sentinels.
// It always turns off client-side caching and the resending of commands.
func New(ctx context.Context, opt rueidis.ClientOption, opts ...Option) (*Client, error) {
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	if ctx == nil {
		return nil, fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	if opt.ReplicaOnly {
		return nil, fmt.Errorf("%w: locks cannot be taken on replicas (ReplicaOnly)", lock.ErrInvalid)
	}
	opt.DisableCache = true
	opt.DisableRetry = true
	// A replica may not know yet who holds a lock.
	//lint:ignore SA1019 it is turned off, and rueidis wants that as long as it has it
	opt.SendToReplicas, opt.ReplicaSelector, opt.ReadNodeSelector = nil, nil, nil
	opt.Standalone.ReplicaAddress = nil
	if opt.ConnWriteTimeout == 0 {
		opt.ConnWriteTimeout = defaultResponseTimeout
	}
	if opt.Dialer.Timeout == 0 {
		opt.Dialer.Timeout = defaultResponseTimeout
	}
	if opt.Sentinel.Dialer.Timeout == 0 { // which would be for as long as the system likes
		opt.Sentinel.Dialer.Timeout = opt.Dialer.Timeout
	}
	if opt.PipelineMultiplex == 0 {
		// Commands of one connection run in the order they were sent: a release
		// cannot overtake the acquisition it follows.
		opt.PipelineMultiplex = -1
	}
	if opt.ClusterOption.MaxMovedRedirections == 0 {
		opt.ClusterOption.MaxMovedRedirections = defaultRedirections
	}
	if opt.Sentinel.MasterSet != "" && opt.Sentinel.TopologyRefreshInterval == 0 {
		opt.Sentinel.TopologyRefreshInterval = sentinelRefresh
	}
	polite(&opt)
	conn, err := connect(ctx, opt)
	if err != nil {
		return nil, fmt.Errorf("redlatch: connect to %s: %w", strings.Join(opt.InitAddress, ", "), err)
	}
	if opt.ConnWriteTimeout <= maxResponseTimeout && opt.Dialer.KeepAlive >= 0 {
		cfg.replyTimeout = 0 // the connection sees to it
	}
	c, err := start(ctx, conn, cfg)
	if err != nil {
		conn.Close()
		return nil, err
	}
	c.owned = true
	return c, nil
}

// connect is rueidis.NewClient, which knows no context.
func connect(ctx context.Context, opt rueidis.ClientOption) (rueidis.Client, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if ctx.Done() == nil {
		return rueidis.NewClient(opt)
	}
	type result struct {
		conn rueidis.Client
		err  error
	}
	connected := make(chan result, 1)
	go func() {
		conn, err := rueidis.NewClient(opt)
		connected <- result{conn, err}
	}()
	select {
	case r := <-connected:
		return r.conn, r.err
	case <-ctx.Done():
		go func() { // ends when the dialer gives up
			if r := <-connected; r.err == nil {
				r.conn.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// Wrap returns a client on a connection that stays the caller's: Close leaves
// it open. It blocks for a few round trips and fails if no server answers. The
// connection may be shared with anything else; renewals do not queue behind its
// commands, and no command is resent or sent to a replica, whatever conn is set
// to do.
func Wrap(ctx context.Context, conn rueidis.Client, opts ...Option) (*Client, error) {
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	if conn == nil {
		return nil, fmt.Errorf("%w: the connection is nil", lock.ErrInvalid)
	}
	if ctx == nil {
		return nil, fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	return start(ctx, conn, cfg)
}

func start(ctx context.Context, conn rueidis.Client, cfg config) (*Client, error) {
	if err := ping(ctx, endless(ctx), conn); err != nil {
		return nil, fmt.Errorf("redlatch: the server does not answer: %w", err)
	}
	sharded, err := sharded(ctx, conn, cfg.mode)
	if err != nil {
		return nil, err
	}
	t, err := telemetry.New(cfg.tracers, cfg.meters, cfg.metricName)
	if err != nil {
		return nil, fmt.Errorf("redlatch: telemetry: %w", err)
	}
	c := &Client{
		conn: conn,
		s: session.New(session.Config{
			Client:          conn,
			ID:              uuid.NewString(),
			WatchdogTimeout: cfg.watchdogTimeout,
			FairWait:        cfg.fairWait,
			HandOffs:        cfg.handOffs,
			MapName:         cfg.mapName,
			Sharded:         sharded,
			ReplyTimeout:    cfg.replyTimeout,
			Logger:          cfg.logger,
			Telemetry:       t,
		}),
	}
	if cfg.startupChecks {
		c.checkAtStartup(ctx)
	}
	return c, nil
}

// ping asks in requests with a context of their own.
func ping(ctx, request context.Context, conn rueidis.Client) error {
	return anyNode(ctx, conn, func(node rueidis.Client) error {
		return node.Do(request, node.B().Ping().Build()).Error()
	})
}

// anyNode asks all nodes at once until one answers well: some of a cluster may be
// down, or hang. If none does, it returns what one has replied, or else the error
// of a connection.
func anyNode(ctx context.Context, conn rueidis.Client, ask func(node rueidis.Client) error) error {
	nodes := conn.Nodes()
	answers := make(chan error, len(nodes))
	for _, node := range nodes {
		go func() { answers <- ask(node) }()
	}
	err := errors.New("no node is known")
	replied := false
	for range nodes {
		select {
		case answer := <-answers:
			if answer == nil {
				return nil
			}
			if !replied {
				err = answer
				_, replied = rueidis.IsRedisErr(answer)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

// endless returns the context for a request that is left behind when ctx ends. With the
// first request whose context can end rueidis gives a connection two goroutines, through
// which all go from then on: whoever takes one lock after the other waits for those, too.
// So what is asked of every new connection is asked without.
func endless(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// sharded decides which kind of pub/sub to use, by the same probe as Redisson:
// a cluster whose nodes answer PUBSUB SHARDNUMSUB shards.
func sharded(ctx context.Context, conn rueidis.Client, mode pubsub.Mode) (bool, error) {
	cluster := conn.Mode() == rueidis.ClientModeCluster
	switch {
	case mode == pubsub.Plain, mode == pubsub.Auto && !cluster:
		return false, nil
	case !cluster:
		return false, fmt.Errorf("%w: sharded pub/sub needs a cluster", lock.ErrInvalid)
	}
	err := anyNode(ctx, conn, func(node rueidis.Client) error {
		return node.Do(endless(ctx), node.B().PubsubShardnumsub().Build()).Error()
	})
	if err == nil {
		return true, nil
	}
	if _, isReply := rueidis.IsRedisErr(err); !isReply {
		return false, fmt.Errorf("redlatch: ask for sharded pub/sub: %w", err)
	}
	if mode == pubsub.Sharded {
		return false, errors.Join(lock.ErrUnsupported, err)
	}
	return false, nil
}

// Close ends every wait and every hold of this client with lock.ErrClosed and
// waits for its goroutines; a connection that New or Open made is closed too.
// The locks still held are not released: the work under them may not have
// noticed yet. They become free when their leases are over. Calling Close again
// does nothing.
func (c *Client) Close() {
	c.s.Close()
	if c.owned {
		c.conn.Close()
	}
}

// ID returns the UUID that all owners of this client begin with.
func (c *Client) ID() string { return c.s.ID }

// NewOwner returns an owner that nobody else has, for lock.WithOwner. It sends
// nothing.
func (c *Client) NewOwner() lock.Owner { return c.s.NewOwner() }

// Ping asks the server for a sign of life and blocks until it comes; in a
// cluster that of any node will do. It returns the error of the connection, or
// lock.ErrClosed.
func (c *Client) Ping(ctx context.Context) error {
	if err := c.s.Err(); err != nil {
		return err
	}
	return ping(ctx, wire.Shared(ctx), c.conn)
}

// PubSub returns a snapshot of the hub that wakes this client's waiters.
func (c *Client) PubSub() pubsub.Stats { return c.s.Hub.Stats() }

// Stats is a snapshot of what a client is doing.
type Stats struct {
	// Waiting is the number of calls that are parked until a lock or permit may be
	// available to them.
	Waiting int
	// Attempting is the number of calls that have a request for a lock or permit in
	// flight, or are about to send one. A call that is being handed a lock by another
	// caller of this client counts, too.
	Attempting int
	// Background is the number of requests that no caller waits for: releases, and
	// the cleanup after requests whose outcome is unknown.
	Background int
}

// Stats returns a snapshot of what the client is doing. It sends nothing. Its cost
// grows with the number of locks that the client holds or waits for.
func (c *Client) Stats() Stats {
	q := c.s.Queues.Stats()
	return Stats{Waiting: q.Waiting, Attempting: q.Attempting, Background: c.s.Running()}
}

// Lock returns the reentrant lock of that name. It sends nothing and does not
// fail: a name that is empty, or whose braces would spread its keys over
// cluster slots, is an error of every method that asks the server.
func (c *Client) Lock(name string, opts ...rlock.Option) *rlock.Lock {
	return rlock.New(c.s, name, opts...)
}

// FencedLock returns the fenced lock of that name: its holds have a fencing
// token. Names are as for Lock.
func (c *Client) FencedLock(name string, opts ...rlock.Option) *rlock.Fenced {
	return rlock.NewFenced(c.s, name, opts...)
}

// FairLock returns the fair lock of that name, which waiters of all processes get
// in the order in which they came. Names are as for Lock. It sends nothing.
func (c *Client) FairLock(name string, opts ...fairlock.Option) *fairlock.Lock {
	return fairlock.New(c.s, name, opts...)
}

// RWLock returns the read-write lock of that name, which many can hold to read or
// one to write. Names are as for Lock. It sends nothing.
func (c *Client) RWLock(name string) *rwlock.RWLock { return rwlock.New(c.s, name) }

// Semaphore returns the semaphore of that name: a number of permits without identity.
// Names are as for Lock. It sends nothing.
func (c *Client) Semaphore(name string) *semaphore.Semaphore { return semaphore.New(c.s, name) }

// PermitSemaphore returns the permit-expirable semaphore of that name: its permits
// come back when their process dies. Names are as for Lock. It sends nothing.
func (c *Client) PermitSemaphore(name string) *semaphore.Expirable {
	return semaphore.NewExpirable(c.s, name)
}

// CountDownLatch returns the count-down latch of that name, at which some wait until
// others have counted to zero. It sends nothing. A name that is empty, or has braces,
// is an error of every method that asks the server: in a cluster its channel would be
// of another slot.
func (c *Client) CountDownLatch(name string) *countdown.Latch { return countdown.New(c.s, name) }

// PlainLock returns the plain lock of that name, which excludes those of redsync,
// redislock and others that set a key. Names are as for Lock. Of the options only
// rlock.WithBackoff means anything to it. It sends nothing.
func (c *Client) PlainLock(name string, opts ...rlock.Option) *rlock.Plain {
	return rlock.NewPlain(c.s, name, opts...)
}

// SpinLock returns the spin lock of that name, which polls instead of using
// pub/sub. Names are as for Lock.
func (c *Client) SpinLock(name string, opts ...rlock.Option) *rlock.Spin {
	return rlock.NewSpin(c.s, name, opts...)
}

// MultiLock returns the lock that is all of the given ones, which may be of any kind and
// of any client. It sends nothing and does not fail: a member that is nil or there twice,
// or none at all, is an error of every method.
func (c *Client) MultiLock(members ...lock.Locker) *multilock.Multi {
	return multilock.New(c.s, members...)
}

// RedLock returns the lock that is a majority of the given ones, of which each is of
// another client, on a server of its own. Usually they have one name. It sends nothing
// and does not fail, as MultiLock. Take an odd number of servers: an even one, which is
// logged, survives the loss of no more of them than one less.
func (c *Client) RedLock(members ...lock.Locker) *multilock.Red {
	return multilock.NewRed(c.s, members...)
}
