package redlatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/probe"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// Client creates all objects and owns what they share: the connection, the pub/sub hub,
// the watchdog and the client id. A process usually has one. Its methods are safe for
// concurrent use.
type Client struct {
	conn  rueidis.Client
	owned bool
	s     *session.Session

	// What the objects of one kind share.
	engine     *engine.Engine
	semaphores *semaphore.Shared
	limiters   *ratelimit.Shared
	latches    *countdown.Shared
	groups     *multilock.Shared
}

// Open connects to the server at the given URL:
//
//	redis://user:password@host:port/database    the scheme valkey means the same
//	rediss://host:port                          TLS; so does valkeys
//	unix:///path/to/socket?db=database
//	redis://host1:port?addr=host2:port&addr=host3:port                  nodes of a cluster
//	redis://host1:port?addr=host2:port&addr=host3:port&master_set=name  sentinels
//
// All parts but the scheme are optional: the default host is localhost, the port 6379, and the
// database 0. Of a cluster or of sentinels, one address that answers is enough; more help if that
// node is down. With rediss, the connections to sentinels use TLS as well. The parameters
// sentinel_username and sentinel_password are the credentials for sentinels: those in front of the
// host are for the servers. The parameters client_name, dial_timeout, write_timeout, skip_verify (of TLS
// certificates) and protocol (2 or 3) have the meaning that [rueidis.ParseURL] gives them. An unknown, empty or
// repeated parameter is an error, except for several addr and an empty skip_verify, which means
// true.
//
// Open blocks like New. If the URL or an option is invalid, the error matches lock.ErrInvalid.
func Open(ctx context.Context, url string, opts ...Option) (*Client, error) {
	opt, err := ParseURL(url)
	if err != nil {
		return nil, err
	}
	return New(ctx, opt, opts...)
}

// Defaults of New where they differ from the defaults of rueidis.
const (
	// defaultResponseTimeout bounds connecting and waiting for a reply. It is well
	// under a third of the default lease.
	defaultResponseTimeout = 3 * time.Second
	defaultRedirections    = 16
	sentinelRefresh        = 5 * time.Second
)

// New connects with the given options and returns a client that owns the connection.
//
// New blocks until the server has answered a few requests. It makes one attempt: it fails at once
// if connections are refused, and after the timeout of a connection or a response if the server is
// silent. It then checks the servers for up to 2 s more and logs problems for locks (see
// WithoutStartupChecks). ctx bounds all of this; if it ends during the checks, New still returns
// the client. If opt has no address or an option is invalid, the error matches lock.ErrInvalid, and
// New sends nothing, unless it has to ask the server whether sharded pub/sub is valid there.
//
// For zero fields of opt, New uses defaults for locks: timeouts of 3 s for responses
// (ConnWriteTimeout) and for connecting (Dialer.Timeout, also of Sentinel), a PING on connections
// that are silent for 1 s (Dialer.KeepAlive, also of Sentinel), one
// connection for pipelined commands (PipelineMultiplex), a limit on redirections, and
// periodic checks of the sentinels. It always disables client-side caching and the
// resending of commands.
//
// Without a ClientName, all connections have the name redlatch:<client id>:<host>:<process id>, so that
// CLIENT LIST, and "redlatch inspect", show which process holds a lock. With RESP2 (AlwaysRESP2), or if the
// server refuses the name, they have none.
func New(ctx context.Context, opt rueidis.ClientOption, opts ...Option) (*Client, error) {
	cfg, err := newConfig(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := checkConnection(&opt); err != nil {
		return nil, ofClient.Refused("connect", err)
	}

	opt.DisableCache = true
	opt.DisableRetry = true

	// Replicas may lag behind the primary.
	opt.SendToReplicas = nil
	//lint:ignore SA1019 deprecated options must still be disabled
	opt.ReplicaSelector = nil
	opt.ReadNodeSelector = nil
	opt.Standalone.ReplicaAddress = nil
	opt.ConnWriteTimeout = cmp.Or(opt.ConnWriteTimeout, defaultResponseTimeout)
	opt.Dialer.Timeout = cmp.Or(opt.Dialer.Timeout, defaultResponseTimeout)
	opt.Sentinel.Dialer.Timeout = cmp.Or(opt.Sentinel.Dialer.Timeout, opt.Dialer.Timeout)

	// rueidis has no default for this one. Without it, it waits for a silent sentinel as long as the kernel does, and
	// follows no failover meanwhile.
	opt.Sentinel.Dialer.KeepAlive = cmp.Or(opt.Sentinel.Dialer.KeepAlive, opt.Dialer.KeepAlive, rueidis.DefaultTCPKeepAlive)

	// Commands of one connection run in order, so a release cannot overtake the acquisition
	// before it.
	opt.PipelineMultiplex = cmp.Or(opt.PipelineMultiplex, -1)
	opt.ClusterOption.MaxMovedRedirections = cmp.Or(opt.ClusterOption.MaxMovedRedirections, defaultRedirections)
	if opt.Sentinel.MasterSet != "" {
		opt.Sentinel.TopologyRefreshInterval = cmp.Or(opt.Sentinel.TopologyRefreshInterval, sentinelRefresh)
	}
	cfg.Conns = wire.NewConns(&opt)
	began := time.Now()
	conn, err := connectNamed(ctx, opt, wire.ConnectionName(cfg.ID))
	if err != nil {
		to := wire.Object{Kind: ofClient.Kind, Name: strings.Join(opt.InitAddress, ", ")}
		return nil, to.ReadFailed(ctx, "connect", began, err)
	}

	cfg.Ordered = opt.PipelineMultiplex < 0 && !opt.DisableAutoPipelining
	cfg.ReplyTimeout = defaultResponseTimeout
	if opt.ConnWriteTimeout <= session.LongestReply && opt.Dialer.KeepAlive >= 0 {
		cfg.ReplyTimeout = 0 // the connection's timeout suffices
	}
	c, err := start(ctx, conn, cfg)
	if err != nil {
		conn.Close()
		return nil, err
	}

	c.owned = true
	return c, nil
}

// connectNamed is connect, and gives the connections that name unless opt has one.
func connectNamed(ctx context.Context, opt rueidis.ClientOption, name string) (rueidis.Client, error) {
	// In RESP2 the name takes a command of its own. A user who loses the right to it, or whose next
	// primary denies it, could not connect any more.
	if opt.ClientName != "" || opt.AlwaysRESP2 {
		return connect(ctx, opt)
	}

	named := opt
	named.ClientName = name
	named.Sentinel.ClientName = cmp.Or(opt.Sentinel.ClientName, name)
	conn, err := connect(ctx, named)

	// Without HELLO, rueidis uses RESP2 and CLIENT SETNAME. Redis 6.2 says only which command is denied.
	var reply *rueidis.RedisError
	if errors.As(err, &reply) {
		if text := strings.ToLower(reply.Error()); strings.Contains(text, "setname") || strings.Contains(text, "'client' command") {
			return connect(ctx, opt)
		}
	}
	return conn, err
}

// ofClient is the object of errors of a client, and of a call that is to make one.
var ofClient = wire.Object{Kind: "client"}

// checkConnection returns an error for options with which locks cannot work.
func checkConnection(opt *rueidis.ClientOption) error {
	if opt.ReplicaOnly {
		return fmt.Errorf("%w: locks cannot be taken on replicas (ReplicaOnly)", lock.ErrInvalid)
	}
	if len(opt.InitAddress) == 0 || slices.Contains(opt.InitAddress, "") {
		return fmt.Errorf("%w: the address of the server is missing (InitAddress)", lock.ErrInvalid)
	}
	if opt.ConnWriteTimeout < 0 || opt.Dialer.Timeout < 0 || opt.Sentinel.Dialer.Timeout < 0 {
		return fmt.Errorf("%w: a timeout of the connection is negative", lock.ErrInvalid)
	}
	return nil
}

// connect is rueidis.NewClient with a context.
func connect(ctx context.Context, opt rueidis.ClientOption) (rueidis.Client, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
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
		go func() {
			if r := <-connected; r.err == nil {
				r.conn.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// Wrap returns a client that uses conn, which remains open after Close. It blocks like New, but
// with the timeouts of conn. If conn is nil, the error matches lock.ErrInvalid. The connection may
// be shared with other code: renewals do not queue behind other commands unless the server is far away,
// and commands are neither resent nor sent to replicas, whatever the settings of conn. A call waits for the reply to
// a request for 3 s at most, however long the timeouts of conn are. Waiters subscribe on a connection of the pool of
// BlockingPoolSize. While others use all of that pool, waiters poll instead, and are late by up to 5 s.
//
// If the address of the server may lead to another one after a failover, conn needs a ConnLifetime: nothing
// else closes a connection to the old primary. In a cluster it needs a MaxMovedRedirections: without, a request never
// ends whose nodes redirect to each other, even after its caller has left. Wrap does not name the connection: its
// ClientName is the caller's (see New). If a hook of conn panics, the outcome of the request is unknown, and the logger
// gets the stack.
func Wrap(ctx context.Context, conn rueidis.Client, opts ...Option) (*Client, error) {
	cfg, err := newConfig(ctx, opts)
	if err != nil {
		return nil, err
	}
	if conn == nil {
		return nil, ofClient.Refused("connect", fmt.Errorf("%w: the connection is nil", lock.ErrInvalid))
	}

	guarded := wire.Guard(conn, func(err error, stack string) { cfg.Logger.Error(err.Error(), "stack", stack) })
	return start(ctx, guarded, cfg)
}

func start(ctx context.Context, conn rueidis.Client, cfg config) (*Client, error) {
	began := time.Now()
	err := ping(ctx, detached(ctx), conn)
	if err != nil {
		return nil, err
	}
	if cfg.Conns != nil && watchdog.IsFar(time.Since(began), cfg.WatchdogTimeout) {
		// In the synchronous mode a renewal could wait for the reply to another request first.
		cfg.Conns.Contended.Store(true)
	}
	if cfg.Sharded, err = sharded(ctx, conn, cfg.mode); err != nil {
		return nil, err
	}
	if cfg.Telemetry, err = telemetry.New(cfg.tracers, cfg.meters, cfg.metricName); err != nil {
		return nil, ofClient.Refused("connect", fmt.Errorf("telemetry: %w", err))
	}

	cfg.Client = conn
	s := session.New(cfg.Config)
	c := &Client{conn: conn, s: s, engine: engine.New(s), latches: countdown.NewShared(s)}
	c.semaphores = semaphore.NewShared(c.engine)
	c.limiters = ratelimit.NewShared(c.engine)
	c.groups = multilock.NewShared(c.engine)
	if cfg.startupChecks {
		probe.LogAtStartup(ctx, c.s, c.conn)
	}
	return c, nil
}

// ping sends requests with the context request.
func ping(ctx, request context.Context, conn rueidis.Client) error {
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, defaultResponseTimeout) // the timeouts of a borrowed connection may be long
	defer cancel()
	return ofClient.ReadFailed(ctx, "ping", began, anyNode(bounded, conn, func(node rueidis.Client) error {
		return node.Do(request, node.B().Ping().Build()).Error()
	}))
}

// anyNode calls ask for all nodes concurrently and returns nil after the first success:
// nodes of a cluster may be down or hang. Without a success it returns the first error
// reply, or else a connection error.
func anyNode(ctx context.Context, conn rueidis.Client, ask func(node rueidis.Client) error) error {
	err := errors.New("no known node")
	replied := false
	for reply := range wire.AskNodes(ctx, conn, func(_ string, node rueidis.Client) error { return ask(node) }) {
		if reply == nil {
			return nil
		}
		if !replied {
			err = reply
			_, replied = rueidis.IsRedisErr(reply)
		}
	}

	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	return err
}

// detached returns a context for a request that is abandoned when ctx ends. At the
// first request with a cancellable context, rueidis starts two goroutines for the
// connection and routes all later requests through them, which slows down sequential
// callers. Requests to new connections therefore use a detached context.
func detached(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// sharded chooses the kind of pub/sub by Redisson's rule: a cluster uses sharded
// pub/sub if its nodes support PUBSUB SHARDNUMSUB.
func sharded(ctx context.Context, conn rueidis.Client, mode pubsub.Mode) (bool, error) {
	cluster := conn.Mode() == rueidis.ClientModeCluster
	if mode == pubsub.Plain || mode == pubsub.Auto && !cluster {
		return false, nil
	}
	if !cluster {
		return false, ofClient.Refused("connect", fmt.Errorf("%w: sharded pub/sub needs a cluster", lock.ErrInvalid))
	}

	began := time.Now()
	err := anyNode(ctx, conn, func(node rueidis.Client) error {
		return node.Do(detached(ctx), node.B().PubsubShardnumsub().Build()).Error()
	})
	if err == nil {
		return true, nil
	}
	if _, isReply := rueidis.IsRedisErr(err); !isReply {
		return false, ofClient.ReadFailed(ctx, "connect", began, err)
	}
	if mode == pubsub.Sharded {
		return false, ofClient.Failed(ctx, "connect", began, errors.Join(lock.ErrUnsupported, err))
	}

	return false, nil
}

// Close ends all waits and holds of this client with lock.ErrClosed and waits for its
// goroutines. It closes a connection that New or Open made. It does not release the
// locks still held, because the work under them may not have noticed yet: they become
// free when their leases end. Shutdown waits for their release. Repeated calls have no effect.
func (c *Client) Close() {
	c.s.Close()
	if c.owned {
		c.conn.Close()
	}
}

// Shutdown closes the client when the locks and permits that this process holds are released. From
// its call on, acquisitions fail with lock.ErrClosed, and waits end with it, those for latches
// included. Renewals, Extend, Unlock, Release and all other methods keep working meanwhile. An
// acquisition whose request was sent before may still succeed. An owner (see lock.WithOwner) that
// holds a lock of one key can still re-enter it, so that its work can finish. A term of an election is such
// a hold: end it first, by the end of the context of Election.Run or by Resign.
//
// Shutdown blocks until all holds have ended and all releases in the background are done. It then
// closes the client like Close and returns nil. If ctx ends first, it closes the client at once and gives up the
// requests under way, but not before a second since its call has passed; a client of Wrap waits a few seconds for
// them. The error then matches context.Cause(ctx) and contains the number of holds that are lost with
// lock.ReasonClosed. It returns an error that matches lock.ErrClosed if
// Close, or another Shutdown, closes the client while holds remain, and nil if the client is
// closed already. If ctx is nil, the error matches lock.ErrInvalid, and nothing happens.
//
// Shutdown does not wait for what no hold of this process will release: what Detach has left; a hold
// or permit with a fixed lease that was dropped without Unlock or Release; and
// permits of a Semaphore, which have no holder. These stay on the server until their lease ends or another process releases them.
func (c *Client) Shutdown(ctx context.Context) error {
	if err := session.CheckContext(ctx); err != nil {
		return ofClient.Refused("shut down", err)
	}
	defer c.Close()

	began := time.Now()
	if err := c.s.Shutdown(ctx); err != nil {
		return &lock.Error{Op: "shut down", Kind: ofClient.Kind, Waited: time.Since(began), Err: err}
	}
	return nil
}

// ID returns the UUID with which all owners of this client begin.
func (c *Client) ID() string { return c.s.ID }

// NewOwner returns an unused owner for lock.WithOwner. It sends nothing.
func (c *Client) NewOwner() lock.Owner { return c.s.NewOwner() }

// Ping checks that the server responds; in a cluster any node suffices. It blocks for
// the reply. The error matches lock.ErrUnavailable or lock.ErrClosed, or is a refusal of
// the server.
func (c *Client) Ping(ctx context.Context) error {
	if err := c.s.Err(); err != nil {
		return ofClient.Refused("ping", err)
	}
	return ping(ctx, wire.Shared(ctx), c.conn)
}

// Probe checks every node, and whether this client's user can use locks of the given
// names there. It checks the rights for objects of all kinds; those that most locks of
// package rlock do not need are separate findings (see probe.Finding.Kind), which matter only
// if such objects are used. Without names it checks no rights. It changes nothing. It
// blocks for a few round trips, at most until ctx ends, and checks nodes concurrently.
// It returns an error that matches lock.ErrInvalid for an invalid name, or the errors
// of nodes that did not answer together with the report on the others. Information that
// a server denies is not an error.
//
// New, Open and Wrap run the same checks with an artificial name, for most locks of
// package rlock, and log the findings.
func (c *Client) Probe(ctx context.Context, names ...string) (probe.Report, error) {
	return probe.Run(ctx, c.s, c.conn, names)
}

// Stats is a snapshot of a client's activity.
type Stats struct {
	// Waiting is the number of calls that are parked until a lock or permit may be
	// available.
	Waiting int
	// Attempting is the number of calls with a request for a lock or permit in flight
	// or about to be sent. It includes calls that receive a lock from another caller of
	// this client.
	Attempting int
	// Background is the number of requests without a waiting caller: releases, and the
	// cleanup after requests whose outcome is unknown.
	Background int
	// PubSub has the numbers of the subscriptions that wake waiters.
	PubSub pubsub.Stats
}

// Stats returns a snapshot of the client's activity. It sends nothing. Its cost grows
// with the number of locks that the client holds or waits for.
func (c *Client) Stats() Stats {
	waiting, attempting := c.s.Callers()
	return Stats{Waiting: waiting, Attempting: attempting, Background: c.s.Running(), PubSub: c.s.Hub.Stats()}
}
