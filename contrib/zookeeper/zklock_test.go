package zklock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

func TestNodesAreAsDocumented(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)}, WithPrefix("/app/a.b"))
	name := unused(t)
	for _, kind := range []struct {
		l      lock.Locker
		folder string
		node   string
	}{
		{p.Lock(name), locks, write}, {p.RWLock(name).Write(), locks, write}, {p.RWLock(name).Read(), locks, read},
		{p.Semaphore(name, 3), semaphores, permit},
	} {
		h := acquire(t, kind.l)
		folder := "/app/a.b/" + kind.folder + "/" + escape(name)
		nodes := children(t, p.conn, folder)
		require.Len(t, nodes, 1)
		assert.True(t, strings.HasPrefix(nodes[0], kind.node+"_"+lock.OwnerOf(h).String()+"_"), nodes[0])
		_, stat, err := p.conn.Exists(folder + "/" + nodes[0])
		require.NoError(t, err)
		assert.Equal(t, stat.Czxid, h.Token())
		assert.Equal(t, p.conn.SessionID(), stat.EphemeralOwner)
		require.NoError(t, h.Unlock(t.Context()))
		assert.Empty(t, children(t, p.conn, folder))
	}

	eventually(t, "the servers remove the folders", func() bool {
		there, _, err := p.conn.Exists("/app")
		require.NoError(t, err)
		return !there
	})
	require.NoError(t, acquire(t, p.Lock(name)).Unlock(t.Context()))
}

// The server grants less than the program asks for, and the hold counts with that.
func TestHoldIsAsCertainAsTheGrantedTimeout(t *testing.T) {
	t.Parallel()
	const most = 20 * tick
	p := openWith(t, []string{common.addr(t)}, 10*most, nil)
	now, _ := p.session.state()
	require.Equal(t, most, now.timeout)

	h := acquire(t, p.Lock(unused(t)))
	assert.LessOrEqual(t, h.Remaining(), most*3/4)
	assert.Greater(t, h.Remaining(), most*3/4-slack)
	require.NoError(t, h.Unlock(t.Context()))

	least := openWith(t, []string{common.addr(t)}, time.Millisecond, nil)
	now, _ = least.session.state()
	require.Equal(t, 2*tick, now.timeout)
}

// A hold outlasts the session timeout, and so does a waiter, as long as the server answers.
func TestHoldsAreKept(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	a, b := open(t, addr), open(t, addr)
	name := unused(t)
	h := acquire(t, a.Lock(name))
	waits := next(t, b, name)
	time.Sleep(timeout * 3 / 2)
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, (<-waits).Unlock(t.Context()))
}

// A lock that is free takes one write, and so does a release. A hand-over between two asks nothing.
func TestRequests(t *testing.T) {
	t.Parallel()
	servers := addrs(ensemble(t, 1, "-Dznode.container.checkIntervalMs=60000")) // it removes folders otherwise
	a := new(counter)
	b := new(counter)
	one, other := openWith(t, servers, timeout, a.dial), openWith(t, servers, timeout, b.dial)
	name := unused(t)
	require.NoError(t, acquire(t, one.Lock(name)).Unlock(t.Context()))

	before := a.requests.Load()
	h := acquire(t, one.Lock(name))
	require.Equal(t, int64(1), a.requests.Load()-before)
	require.NoError(t, h.Unlock(t.Context()))
	require.Equal(t, int64(2), a.requests.Load()-before)

	h = acquire(t, one.Lock(name))
	next := make(chan lock.Hold, 1)
	go func() { next <- acquire(t, other.Lock(name)) }()
	eventually(t, "the other waits", func() bool { return b.requests.Load() == 3 }) // it queues, asks, and watches
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, h.Unlock(t.Context()))
	h = <-next
	require.Equal(t, int64(3), b.requests.Load())
	require.NoError(t, h.Unlock(t.Context()))
}

// counter is a dialer that counts requests, but no pings.
type counter struct{ requests atomic.Int64 }

func (c *counter) dial(network, address string, timeout time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, timeout)
	if err != nil {
		return nil, err
	}
	return counted{conn, c}, nil
}

type counted struct {
	net.Conn
	c *counter
}

const ping = 11

func (c counted) Write(p []byte) (int, error) {
	connects := binary.BigEndian.Uint32(p[4:]) == 0
	if !connects && binary.BigEndian.Uint32(p[typeInRequest:]) != ping {
		c.c.requests.Add(1)
	}
	return c.Conn.Write(p)
}

// Waiters that come and go while the lock is held share one watch.
func TestWaitersThatLeaveDoNotAddWatches(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	requests := new(counter)
	conn, session := connect(t, []string{common.addr(t)}, timeout, requests.dial)
	require.NoError(t, session.await(t.Context(), conn))
	s := newStore(conn, session, DefaultPrefix, zk.WorldACL(zk.PermAll))
	waiter := driver.NewClient(s)
	defer waiter.Close()
	name := unused(t)
	h := acquire(t, p.Lock(name))
	watches := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.watches)
	}
	const waits = 40
	for range waits {
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, err := waiter.Lock(name).Lock(ctx)
			left <- err
		}()
		eventually(t, "it waits", func() bool { return len(nodes(t, p.conn, name)) == 2 && watches() == 1 })
		leave()
		require.Error(t, <-left)
		eventually(t, "the node of the waiter is gone", func() bool { return len(nodes(t, p.conn, name)) == 1 })
	}
	assert.Equal(t, 1, watches())
	assert.Less(t, requests.requests.Load(), int64(waits*7/2)) // each queues, asks and leaves

	// Watches that are over do not stay either.
	require.NoError(t, h.Unlock(t.Context()))
	for range 2*minWatches + 10 {
		h := acquire(t, p.Lock(name))
		_, err := waiter.Lock(name).Lock(t.Context(), lock.Wait(5*time.Millisecond))
		require.Error(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	}
	assert.LessOrEqual(t, watches(), 2*minWatches)
}

func TestOperatorRemovesNodes(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	name := unused(t)
	h := acquire(t, p.Lock(name))
	other := acquire(t, p.Lock(unused(t)))
	next := make(chan lock.Hold, 1)
	go func() { next <- acquire(t, p.Lock(name)) }()
	folder := DefaultPrefix + "/" + locks + "/" + escape(name)
	var all []string
	eventually(t, "the other waits", func() bool { all = nodes(t, p.conn, name); return len(all) == 2 })

	// The waiter queues again.
	for _, node := range all {
		if !strings.Contains(node, lock.OwnerOf(h).String()+"_") {
			require.NoError(t, p.conn.Delete(folder+"/"+node, -1))
		}
	}
	eventually(t, "the waiter queues again", func() bool { return len(nodes(t, p.conn, name)) == 2 })

	began := time.Now()
	for _, node := range nodes(t, p.conn, name) {
		if strings.Contains(node, lock.OwnerOf(h).String()+"_") {
			require.NoError(t, p.conn.Delete(folder+"/"+node, -1))
		}
	}
	var lost *lock.LostError
	select {
	case <-h.Context().Done():
	case <-time.After(soon):
	}
	require.ErrorAs(t, context.Cause(h.Context()), &lost)
	assert.Equal(t, lock.ReasonGone, lost.Reason)
	assert.ErrorIs(t, lost, zk.ErrNoNode)
	assert.Less(t, time.Since(began), timeout/beats+slack)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	require.NoError(t, (<-next).Unlock(t.Context()))
	require.NoError(t, other.Unlock(t.Context()), "the others stay")

	h = acquire(t, p.Lock(name))
	require.NoError(t, p.conn.Delete(folder+"/"+nodes(t, p.conn, name)[0], -1))
	require.ErrorIs(t, h.Extend(t.Context(), time.Second), lock.ErrLost)
	h = acquire(t, p.Lock(name))
	require.NoError(t, p.conn.Delete(folder+"/"+nodes(t, p.conn, name)[0], -1))
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
}

func TestRefusalsAreTheServers(t *testing.T) {
	t.Parallel()
	owner := admin(t, common.addr(t))
	require.NoError(t, owner.AddAuth("digest", []byte("owner:secret")))
	_, err := owner.Create("/closed", nil, 0, zk.DigestACL(zk.PermAll, "owner", "secret"))
	require.NoError(t, err)

	p := open(t, []string{common.addr(t)}, WithPrefix("/closed"))
	for range 2 {
		_, err := p.Lock("a").Lock(t.Context(), lock.Wait(soon))
		require.ErrorIs(t, err, zk.ErrNoAuth)
		for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate} {
			require.NotErrorIs(t, err, kind)
		}
	}

	require.NoError(t, p.conn.AddAuth("digest", []byte("owner:secret")))
	acl := zk.DigestACL(zk.PermRead|zk.PermWrite|zk.PermCreate|zk.PermDelete, "owner", "secret")
	allowed, err := New(t.Context(), p.conn, p.session, WithPrefix("/closed"), WithACL(acl))
	require.NoError(t, err)
	h := acquire(t, allowed.Lock("a"))
	require.NoError(t, h.Extend(t.Context(), time.Second))
	require.NoError(t, h.Unlock(t.Context()))
	allowed.Close()
	_, _, err = admin(t, common.addr(t)).Children("/closed/locks/a")
	require.ErrorIs(t, err, zk.ErrNoAuth)
}

// The rights to release a lock are taken away, and come back later.
func TestReleaseThatIsRefused(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	a, b := open(t, []string{addr}), open(t, []string{addr})
	name := unused(t)
	folder := DefaultPrefix + "/" + locks + "/" + escape(name)
	h := acquire(t, a.Lock(name))
	_, err := b.conn.SetACL(folder, zk.WorldACL(zk.PermAll&^zk.PermDelete), -1)
	require.NoError(t, err)
	require.ErrorIs(t, h.Unlock(t.Context()), zk.ErrNoAuth)
	require.Len(t, nodes(t, b.conn, name), 1)

	_, err = b.conn.SetACL(folder, zk.WorldACL(zk.PermAll), -1)
	require.NoError(t, err)
	require.NoError(t, acquire(t, b.Lock(name)).Unlock(t.Context()))
}

// A call without an answer has left a node that its client may not remove until later.
func TestLeftoverWhoseRemovalIsRefused(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	link := testserver.NewProxy(t, addr)
	requests := new(counter)
	a, b := openWith(t, []string{link.Addr}, timeout, requests.dial), open(t, []string{addr})
	name := unused(t)
	folder := DefaultPrefix + "/" + locks + "/" + escape(name)
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
	link.Set(testserver.Mute)
	tried := make(chan error, 1)
	go func() {
		_, err := a.Lock(name).TryLock(context.Background())
		tried <- err
	}()
	eventually(t, "the node is there", func() bool { return len(nodes(t, b.conn, name)) == 1 })
	_, err := b.conn.SetACL(folder, zk.WorldACL(zk.PermAll&^zk.PermDelete), -1)
	require.NoError(t, err)
	before := requests.requests.Load()
	link.Set(testserver.Pass)
	link.Cut()
	require.ErrorIs(t, <-tried, lock.ErrIndeterminate)
	eventually(t, "it tries to remove the node", func() bool { return requests.requests.Load() >= before+3 })

	_, err = b.conn.SetACL(folder, zk.WorldACL(zk.PermAll), -1)
	require.NoError(t, err)
	require.NoError(t, acquire(t, b.Lock(name)).Unlock(t.Context()))
}

func TestNewChecksItsArguments(t *testing.T) {
	t.Parallel()
	conn, session := connect(t, []string{common.addr(t)}, timeout, nil)
	for _, opt := range []Option{nil, WithPrefix("a"), WithACL(nil)} {
		_, err := New(t.Context(), conn, session, opt)
		require.ErrorIs(t, err, lock.ErrInvalid)
	}
	_, err := New(t.Context(), nil, session)
	require.ErrorIs(t, err, lock.ErrInvalid)
	_, err = New(t.Context(), conn, nil)
	require.ErrorIs(t, err, lock.ErrInvalid)

	// The session of another connection, and one of none.
	other, _ := connect(t, []string{common.addr(t)}, timeout, nil)
	for _, s := range []*Session{session, NewSession(nil)} {
		_, err := New(t.Context(), other, s)
		require.ErrorIs(t, err, lock.ErrInvalid)
	}

	ports, err := testserver.FreePorts(1)
	require.NoError(t, err)
	away, session := connect(t, []string{fmt.Sprintf("127.0.0.1:%d", ports[0])}, timeout, nil)
	boom := errors.New("boom")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, boom)
	defer cancel()
	_, err = New(ctx, away, session)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorIs(t, err, boom)
}

// A program that closes the connection first loses its holds before the servers give them to others.
func TestConnectionClosedBeforeTheClient(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	a, b := open(t, addr), open(t, addr)
	name := unused(t)
	h := acquire(t, a.Lock(name))
	waits := make(chan error, 1)
	go func() {
		_, err := a.Lock(name).Lock(context.Background())
		waits <- err
	}()
	eventually(t, "the other waits", func() bool { return len(nodes(t, b.conn, name)) == 2 })

	a.conn.Close()
	next := acquire(t, b.Lock(name))
	require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
	require.ErrorIs(t, <-waits, lock.ErrClosed)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	_, err := a.Lock(name).Lock(t.Context())
	require.ErrorIs(t, err, lock.ErrClosed)
	require.NoError(t, next.Unlock(t.Context()))

	began := time.Now()
	a.Close()
	assert.Less(t, time.Since(began), closeTimeout)
	_, err = New(t.Context(), a.conn, a.session)
	require.ErrorIs(t, err, lock.ErrClosed)
}

// Close leaves nothing in a session that goes on, whatever its calls are at.
func TestCloseBesideCalls(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	name := unused(t)
	for range 20 {
		c, err := New(t.Context(), p.conn, p.session)
		require.NoError(t, err)
		var done sync.WaitGroup
		for i := range 8 {
			done.Go(func() {
				var opts []lock.Option
				if i%2 == 0 {
					opts = append(opts, lock.Wait(0))
				}
				for {
					h, err := c.Lock(name).Lock(context.Background(), opts...)
					if errors.Is(err, lock.ErrClosed) {
						return
					}
					if err == nil {
						_ = h.Unlock(context.Background())
					} else {
						assert.ErrorIs(t, err, lock.ErrNotAcquired)
					}
				}
			})
		}
		time.Sleep(rand.N(10 * time.Millisecond))
		c.Close()
		require.Empty(t, nodes(t, p.conn, name))
		done.Wait()
	}
}

// Many wait, and some of them leave.
func TestManyWaiters(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	clients := []*process{open(t, addr), open(t, addr)}
	name := unused(t)
	h := acquire(t, clients[0].Lock(name))
	const waiters = 300
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var done sync.WaitGroup
	n, left := 0, atomic.Int64{}
	for i := range waiters {
		done.Go(func() {
			of := t.Context()
			if i%3 != 0 {
				of = ctx
			}
			err := clients[i%2].Lock(name).Do(of, func(context.Context) error {
				n++ // the race detector sees what is not exclusive
				return nil
			})
			if errors.Is(err, lock.ErrNotAcquired) {
				left.Add(1)
			} else {
				assert.NoError(t, err)
			}
		})
	}
	eventually(t, "all wait", func() bool { return len(nodes(t, clients[0].conn, name)) == 1+waiters })
	leave()
	require.NoError(t, h.Unlock(t.Context()))
	done.Wait()
	assert.Equal(t, waiters, n+int(left.Load()))
	assert.GreaterOrEqual(t, n, waiters/3)
	eventually(t, "nothing is left", func() bool { return len(nodes(t, clients[0].conn, name)) == 0 })
}

// A client that is closed leaves the connection as it was.
func TestCloseLeavesTheConnection(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	name := unused(t)
	for range 3 {
		c, err := New(t.Context(), p.conn, p.session)
		require.NoError(t, err)
		h := acquire(t, c.Lock(name))
		c.Close()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.Empty(t, nodes(t, p.conn, name))
	}
}

func TestSemaphoreCounts(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	a, b := open(t, addr), open(t, addr)
	name := unused(t)
	const permits = 3
	var holds []lock.Hold
	for i := range permits {
		holds = append(holds, acquire(t, []*process{a, b}[i%2].Semaphore(name, permits)))
	}
	_, err := b.Semaphore(name, permits).TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrNotAcquired)

	// Each release of any permit lets one of those in who wait.
	got := make(chan lock.Hold, 5)
	folder := DefaultPrefix + "/" + semaphores + "/" + escape(name)
	for i := range cap(got) {
		go func() { got <- acquire(t, []*process{a, b}[i%2].Semaphore(name, permits)) }()
		eventually(t, "it waits", func() bool { return len(children(t, a.conn, folder)) == permits+i+1 })
	}
	for _, i := range []int{1, 2, 0} {
		require.NoError(t, holds[i].Unlock(t.Context()))
		holds[i] = <-got
		require.Empty(t, got)
	}
	for range 2 {
		require.NoError(t, holds[2].Unlock(t.Context()))
		holds[2] = <-got
	}
	for _, h := range holds {
		require.NoError(t, h.Unlock(t.Context()))
	}
}

// A call that does not wait leaves nothing that the next one could find.
func TestTryAfterTry(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	a, b := open(t, addr), open(t, addr)
	name := unused(t)
	for range 50 {
		h := acquire(t, a.Lock(name))
		_, err := b.Lock(name).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h.Unlock(t.Context()))
		h, err = a.Lock(name).TryLock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	}
}
