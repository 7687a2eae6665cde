package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncpool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// lease is that of all peers: longer than any measurement.
const lease = 30 * time.Second

// The floor does the work of an uncontended pair on the server and nothing else: two scripts
// through rueidis.
var (
	floorAcquire = rueidis.NewLuaScript(`if redis.call('EXISTS', KEYS[1]) == 0 then
redis.call('HSET', KEYS[1], ARGV[2], 1) redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 0 end return 1`)
	floorRelease = rueidis.NewLuaScript(`if redis.call('HGET', KEYS[1], ARGV[1]) == '1' then
redis.call('DEL', KEYS[1]) return redis.call('PUBLISH', ARGV[2], '0') end return -1`)
)

type floor struct {
	conn   rueidis.Client
	owners atomic.Uint64
}

func openFloor(_ context.Context, addrs []string) (service, error) {
	conn, err := rueidis.NewClient(floorOptions(addrs...))
	return &floor{conn: conn}, err
}

func floorOptions(addrs ...string) rueidis.ClientOption {
	return rueidis.ClientOption{InitAddress: addrs, DisableCache: true, PipelineMultiplex: -1, ConnWriteTimeout: 3 * time.Second}
}

func (f *floor) close() { f.conn.Close() }

func (f *floor) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	return &floorPair{floor: f, keys: []string{name}, channel: "redisson_lock__channel:{" + name + "}"}, nil
}

type floorPair struct {
	*floor
	keys           []string
	channel, owner string
}

func (p *floorPair) acquire(ctx context.Context) error {
	p.owner = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11:" + strconv.FormatUint(p.owners.Add(1), 10)
	n, err := floorAcquire.Exec(ctx, p.conn, p.keys, []string{"30000", p.owner}).AsInt64()
	if err == nil && n != 0 {
		err = errors.New("already held")
	}
	return err
}

func (p *floorPair) release(ctx context.Context) error {
	return floorRelease.Exec(ctx, p.conn, p.keys, []string{p.owner, p.channel}).Error()
}

type ours struct {
	clients  []*redlatch.Client
	borrowed []rueidis.Client
}

func openRedlatch(ctx context.Context, addrs []string) (service, error) { return openOurs(ctx, addrs) }

// openUnlimited opens clients whose waiters never pause for those of other processes.
func openUnlimited(ctx context.Context, addrs []string) (service, error) {
	return openOurs(ctx, addrs, redlatch.WithTurn(math.MaxInt64))
}

func openOurs(ctx context.Context, addrs []string, opts ...redlatch.Option) (service, error) {
	s := &ours{}
	for _, addr := range addrs {
		c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
		if err != nil {
			return nil, err
		}
		s.clients = append(s.clients, c)
	}
	return s, nil
}

// openWrapped opens clients that borrow a connection with the options of the floor.
func openWrapped(ctx context.Context, addrs []string) (service, error) {
	s := &ours{}
	for _, addr := range addrs {
		conn, err := rueidis.NewClient(floorOptions(addr))
		if err != nil {
			return nil, err
		}
		s.borrowed = append(s.borrowed, conn)
		c, err := redlatch.Wrap(ctx, conn)
		if err != nil {
			return nil, err
		}
		s.clients = append(s.clients, c)
	}
	return s, nil
}

func (s *ours) close() {
	for _, c := range s.clients {
		c.Close()
	}
	for _, conn := range s.borrowed {
		conn.Close()
	}
}

func (s *ours) operation(ctx context.Context, t task, name string) (operation, error) {
	c := s.clients[0]
	switch t.Kind {
	case "lock":
		return &ourPair{l: c.Lock(name)}, nil
	case "fair":
		return &ourPair{l: c.FairLock(name)}, nil
	case "rw":
		return &ourReadWrite{t: t, read: ourPair{l: c.RWLock(name).Read()}, write: ourPair{l: c.RWLock(name).Write()}}, nil
	case "red":
		var members []lock.Locker
		for _, c := range s.clients {
			members = append(members, c.Lock(name))
		}
		return &ourPair{l: c.RedLock(members)}, nil
	case "multi":
		var members []lock.Locker
		for i := range 3 {
			members = append(members, c.Lock("{"+name+"}-"+strconv.Itoa(i)))
		}
		return &ourPair{l: c.MultiLock(members...)}, nil
	case "permit":
		s := c.PermitSemaphore(name)
		_, err := s.TrySetPermits(ctx, t.Permits)
		return &ourLeased{s: s}, err
	case "semaphore":
		s := c.Semaphore(name)
		_, err := s.TrySetPermits(ctx, t.Permits)
		return ourPermit{s}, err
	case "rate":
		return ourPermits{c.RateLimiter(name, ratelimit.Rate(t.Permits, limitPer))}, nil
	}
	return nil, unsupported(t)
}

type ourPair struct {
	l lock.Locker
	h lock.Hold
}

func (p *ourPair) acquire(ctx context.Context) (err error) {
	p.h, err = p.l.Lock(ctx)
	return err
}

func (p *ourPair) release(ctx context.Context) error { return p.h.Unlock(ctx) }

type ourReadWrite struct {
	t           task
	read, write ourPair
	last        *ourPair
}

func (p *ourReadWrite) acquire(ctx context.Context) error {
	p.last = &p.read
	if p.t.writes() {
		p.last = &p.write
	}
	return p.last.acquire(ctx)
}

func (p *ourReadWrite) release(ctx context.Context) error { return p.last.release(ctx) }

type ourPermit struct{ s *semaphore.Semaphore }

func (p ourPermit) acquire(ctx context.Context) error { return p.s.Acquire(ctx, 1) }
func (p ourPermit) release(ctx context.Context) error { return p.s.Release(ctx, 1) }

type ourLeased struct {
	s *semaphore.PermitSemaphore
	p *semaphore.Permit
}

func (p *ourLeased) acquire(ctx context.Context) (err error) {
	p.p, err = p.s.Acquire(ctx, 1)
	return err
}

func (p *ourLeased) release(ctx context.Context) error { return p.p.Release(ctx) }

type redsyncs struct {
	conns []*redis.Client
	rs    *redsync.Redsync
}

func openRedsync(_ context.Context, addrs []string) (service, error) {
	s := &redsyncs{}
	var pools []syncpool.Pool
	for _, addr := range addrs {
		c := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 100})
		s.conns, pools = append(s.conns, c), append(pools, goredis.NewPool(c))
	}
	s.rs = redsync.New(pools...)
	return s, nil
}

func (s *redsyncs) close() {
	for _, c := range s.conns {
		_ = c.Close()
	}
}

func (s *redsyncs) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" && t.Kind != "red" {
		return nil, unsupported(t)
	}
	return redsyncPair{s.rs.NewMutex(name, redsync.WithExpiry(lease), redsync.WithTries(1_000_000))}, nil
}

type redsyncPair struct{ m *redsync.Mutex }

func (p redsyncPair) acquire(ctx context.Context) error { return p.m.LockContext(ctx) }

func (p redsyncPair) release(ctx context.Context) error {
	_, err := p.m.UnlockContext(ctx)
	return err
}

type redislocks struct {
	conn *redis.Client
	c    *redislock.Client
}

func openRedislock(_ context.Context, addrs []string) (service, error) {
	conn := redis.NewClient(&redis.Options{Addr: addrs[0], PoolSize: 100})
	return redislocks{conn, redislock.New(conn)}, nil
}

func (s redislocks) close() { _ = s.conn.Close() }

func (s redislocks) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	// It has no default strategy for waiting; this one is from its documentation.
	return &redislockPair{c: s.c, name: name, o: &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}}, nil
}

type redislockPair struct {
	c    *redislock.Client
	name string
	o    *redislock.Options
	l    *redislock.Lock
}

func (p *redislockPair) acquire(ctx context.Context) (err error) {
	p.l, err = p.c.Obtain(ctx, p.name, lease, p.o)
	return err
}

func (p *redislockPair) release(ctx context.Context) error { return p.l.Release(ctx) }

type rueidislocks struct{ l rueidislock.Locker }

func openRueidislock(_ context.Context, addrs []string) (service, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: addrs},
		KeyMajority:  1, NoLoopTracking: true, // as documented for one server
		KeyValidity: lease,
		// The wait for a reply. With the default, 20 ms, it hangs if the machine is busy for
		// that long: see giveUpAfter.
		TryNextAfter: time.Second,
	})
	return rueidislocks{l}, err
}

func (s rueidislocks) close() { s.l.Close() }

func (s rueidislocks) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	return &rueidislockPair{l: s.l, name: name}, nil
}

type rueidislockPair struct {
	l    rueidislock.Locker
	name string
	give context.CancelFunc
	// own is the context of calls, and giveUp cancels it.
	own    context.Context
	giveUp *time.Timer
}

// giveUpAfter bounds the wait of rueidislock for a free lock. If a reply takes longer than
// TryNextAfter, it waits for a message that never comes.
const giveUpAfter = 5 * time.Second

// acquire returns a hold that also ends with the context. Calls share a context until it ends.
func (p *rueidislockPair) acquire(ctx context.Context) (err error) {
	if p.own == nil || p.own.Err() != nil {
		var cancel context.CancelFunc
		p.own, cancel = context.WithCancel(ctx)
		p.giveUp = time.AfterFunc(giveUpAfter, cancel)
	} else {
		p.giveUp.Reset(giveUpAfter)
	}
	_, p.give, err = p.l.WithContext(p.own, p.name)
	if !p.giveUp.Stop() {
		p.own = nil
		if err != nil {
			err = fmt.Errorf("it hung for %v: %w", giveUpAfter, err)
		}
	}
	return err
}

func (p *rueidislockPair) release(context.Context) error {
	p.give()
	return nil
}
