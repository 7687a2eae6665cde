package zklock

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// next starts a waiter for a lock, and returns when it waits.
func next(t *testing.T, p *process, name string) <-chan lock.Hold {
	t.Helper()
	before := len(nodes(t, p.conn, name))
	got := make(chan lock.Hold, 1)
	go func() {
		h, err := p.Lock(name).Lock(context.Background())
		if assert.NoError(t, err) {
			got <- h
		}
	}()
	eventually(t, "it waits", func() bool { return len(nodes(t, p.conn, name)) == before+1 })
	return got
}

// lost waits until a hold is lost, and returns why.
func lost(t *testing.T, h lock.Hold) *lock.LostError {
	t.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(timeout + soon):
		require.Fail(t, "the hold is not lost")
	}
	var lost *lock.LostError
	require.ErrorAs(t, context.Cause(h.Context()), &lost)
	return lost
}

// The session ends at the server, as when it is closed by another connection.
func TestSessionEndedByHand(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	l := &listener{answers: make(map[int64][]byte)}
	a, b := openWith(t, []string{addr}, timeout, l.dial), open(t, []string{addr})
	name, other := unused(t), unused(t)
	h, theirs := acquire(t, a.Lock(name)), acquire(t, b.Lock(other))
	waits := next(t, a, other)
	takes := next(t, b, name)

	began := time.Now()
	require.NoError(t, l.end(addr, a.conn.SessionID()))
	reason := lost(t, h)
	assert.Equal(t, lock.ReasonGone, reason.Reason)
	assert.ErrorIs(t, reason, zk.ErrSessionExpired)
	assert.Less(t, time.Since(began), soon)
	require.NoError(t, (<-takes).Unlock(t.Context()))
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

	// The waiter queues again, with the new session.
	eventually(t, "the waiter is back", func() bool { return len(nodes(t, b.conn, other)) == 2 })
	require.NoError(t, theirs.Unlock(t.Context()))
	require.NoError(t, (<-waits).Unlock(t.Context()))
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
	require.Empty(t, nodes(t, b.conn, name))
	require.Empty(t, nodes(t, b.conn, other))
}

// A request whose answer is lost has created a node. The call gets the lock, and nothing else stays.
func TestLostReplies(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	b := open(t, []string{addr})
	link := testserver.NewProxy(t, addr)
	a := open(t, []string{link.Addr})
	name := unused(t)
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))

	// Of the creation.
	link.Set(testserver.Mute)
	got := make(chan lock.Hold, 1)
	go func() { got <- acquire(t, a.Lock(name)) }()
	eventually(t, "the node is there", func() bool { return len(nodes(t, b.conn, name)) == 1 })
	link.Set(testserver.Pass)
	link.Cut()
	h := <-got
	require.NoError(t, h.Context().Err())
	_, err := b.Lock(name).TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrNotAcquired)

	// Of the release. The node is gone, and by whom is not known.
	eventually(t, "only the holder's node is there", func() bool { return len(nodes(t, b.conn, name)) == 1 })
	link.Set(testserver.Mute)
	released := make(chan error, 1)
	go func() { released <- h.Unlock(context.Background()) }()
	eventually(t, "the node is gone", func() bool { return len(nodes(t, b.conn, name)) == 0 })
	link.Set(testserver.Pass)
	link.Cut()
	require.ErrorIs(t, <-released, lock.ErrIndeterminate)

	// Of a call that does not wait.
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
	link.Set(testserver.Mute)
	tried := make(chan error, 1)
	go func() {
		_, err := a.Lock(name).TryLock(context.Background())
		tried <- err
	}()
	eventually(t, "the node is there", func() bool { return len(nodes(t, b.conn, name)) == 1 })
	link.Set(testserver.Pass)
	link.Cut()
	require.ErrorIs(t, <-tried, lock.ErrIndeterminate)
	eventually(t, "nothing is left", func() bool { return len(nodes(t, b.conn, name)) == 0 })
}

// A request that a call has left arrives late, when its session has another connection.
func TestRequestThatArrivesLate(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	b := open(t, []string{addr})
	slow, fast := testserver.NewProxy(t, addr), testserver.NewProxy(t, addr)
	fast.Down()
	a := open(t, []string{slow.Addr, fast.Addr})
	name := unused(t)
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))

	slow.Set(testserver.Stall)
	_, err := a.Lock(name).Lock(t.Context(), lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrIndeterminate)
	slow.Set(testserver.Stall | testserver.Refuse)
	fast.Set(testserver.Pass)
	a.session.cut()
	eventually(t, "there is another connection", func() bool { now, _ := a.session.state(); return now.connected })
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))

	slow.Set(testserver.Refuse) // the server gets the request
	h, err := b.Lock(name).Lock(t.Context(), lock.Wait(timeout+soon))
	require.NoError(t, err)
	require.NoError(t, h.Unlock(t.Context()))
	eventually(t, "nothing is left", func() bool { return len(nodes(t, b.conn, name)) == 0 })
}

// The connection ends again and again. The session survives, and no hold is lost.
func TestConnectionsThatEnd(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	link := testserver.NewProxy(t, addr)
	a, b := openWith(t, []string{link.Addr}, 20*tick, nil), open(t, []string{addr})
	name := unused(t)
	h := acquire(t, a.Lock(name))
	waits := next(t, b, name)
	for range 3 {
		link.Cut()
		require.NoError(t, h.Extend(t.Context(), time.Second))
	}
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))

	// So do waiters.
	theirs := <-waits
	waits = next(t, a, name)
	link.Cut()
	require.NoError(t, theirs.Unlock(t.Context()))
	require.NoError(t, (<-waits).Unlock(t.Context()))
}

// forgetful is a dialer of connections that do not take over the watches of earlier ones.
type forgetful struct{ asked atomic.Int64 }

func (f *forgetful) dial(network, address string, timeout time.Duration) (net.Conn, error) {
	c, err := net.DialTimeout(network, address, timeout)
	if err != nil {
		return nil, err
	}
	return forgets{c, f}, nil
}

type forgets struct {
	net.Conn
	f *forgetful
}

const (
	setWatches       = 101
	pathsOfWatches   = typeInRequest + 4 + 8 // the latest transaction precedes them
	noPathsOfWatches = 3 * 4                 // three lists of no length
)

func (c forgets) Write(p []byte) (int, error) {
	if len(p) < pathsOfWatches || binary.BigEndian.Uint32(p[typeInRequest:]) != setWatches {
		return c.Conn.Write(p)
	}
	c.f.asked.Add(1)
	none := append(slices.Clone(p[:pathsOfWatches]), make([]byte, noPathsOfWatches)...)
	binary.BigEndian.PutUint32(none, uint32(len(none)-4))
	_, err := c.Conn.Write(none)
	return len(p), err
}

// A waiter does not rely on the watches of an earlier connection.
func TestWatchesThatAreNotTakenOver(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	link := testserver.NewProxy(t, addr)
	var f forgetful
	conn, session := connect(t, []string{link.Addr}, 20*tick, f.dial)
	require.NoError(t, session.await(t.Context(), conn))
	s := newStore(conn, session, DefaultPrefix, zk.WorldACL(zk.PermAll))
	client := driver.NewClient(s)
	defer client.Close()
	b := open(t, []string{addr})
	name := unused(t)
	h := acquire(t, b.Lock(name))
	got := make(chan lock.Hold, 1)
	go func() { got <- acquire(t, client.Lock(name)) }()
	eventually(t, "it watches", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, w := range s.watches {
			<-w.answered
		}
		return len(s.watches) == 1
	})

	link.Cut()
	eventually(t, "there is another connection", func() bool { return f.asked.Load() == 1 })
	require.NoError(t, h.Unlock(t.Context()))
	select {
	case h := <-got:
		require.NoError(t, h.Unlock(t.Context()))
	case <-time.After(soon):
		require.Fail(t, "the waiter has not heard of the release")
	}
}

// The program closes a connection that has no server: nobody says so.
func TestConnectionClosedWithoutAServer(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	link := testserver.NewProxy(t, addr)
	a, b := open(t, []string{link.Addr}), open(t, []string{addr})
	name := unused(t)
	h := acquire(t, b.Lock(name))
	failed := make(chan error, 2)
	wait := func(l lock.Locker) {
		_, err := l.Lock(context.Background())
		failed <- err
	}
	go wait(a.Lock(name))
	eventually(t, "it waits", func() bool { return len(nodes(t, b.conn, name)) == 2 })
	link.Down()
	eventually(t, "there is no connection", func() bool { now, _ := a.session.state(); return !now.connected })
	go wait(a.Lock(unused(t)))
	time.Sleep(2 * time.Second)
	require.Empty(t, failed, "go-zookeeper goes on")

	a.conn.Close()
	for range cap(failed) {
		select {
		case err := <-failed:
			require.ErrorIs(t, err, lock.ErrClosed)
		case <-time.After(soon):
			require.Fail(t, "a call waits for a connection that is closed")
		}
	}
	require.NoError(t, h.Unlock(t.Context()))
}

// One of the addresses accepts connections and does not answer, or only begins to. The session survives the attempts to use
// it.
func TestServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for name, says := range map[string][]byte{"nothing": nil, "length of the answer": {0, 0, 0, connectAnswer - 4}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			doesNotAnswer(t, says)
		})
	}
}

func doesNotAnswer(t *testing.T, says []byte) {
	hole, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var accepted sync.WaitGroup
	defer accepted.Wait()
	defer hole.Close()
	accepted.Go(func() {
		for {
			c, err := hole.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = c.Write(says)
		}
	})

	link := testserver.NewProxy(t, common.addr(t))
	a := openWith(t, []string{hole.Addr().String(), link.Addr}, 20*tick, nil)
	h := acquire(t, a.Lock(unused(t)))
	for range 2 {
		link.Cut()
		require.NoError(t, h.Extend(t.Context(), time.Second))
	}
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))
}

// A hold ends by the local clock before the server gives the lock to another, whether connections are refused or silent.
func TestHoldEndsBeforeTheSession(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	for name, away := range map[string]func(*testserver.Proxy){
		"refused": (*testserver.Proxy).Down,
		"silent":  func(p *testserver.Proxy) { p.Set(testserver.Stall) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			link := testserver.NewProxy(t, addr)
			a, b := open(t, []string{link.Addr}), open(t, []string{addr})
			name := unused(t)
			h := acquire(t, a.Lock(name))
			fails := make(chan error, 1)
			held := unused(t)
			theirs := acquire(t, b.Lock(held))
			go func() {
				_, err := a.Lock(held).Lock(context.Background(), lock.FailFast())
				fails <- err
			}()
			eventually(t, "it waits", func() bool { return len(nodes(t, b.conn, held)) == 2 })
			takes := next(t, b, name)

			began := time.Now()
			away(link)
			reason := lost(t, h)
			assert.Equal(t, lock.ReasonExpired, reason.Reason)
			assert.InDelta(t, timeout*3/4, time.Since(began), float64(timeout/beats+slack))
			require.ErrorIs(t, <-fails, lock.ErrUnavailable)
			require.Empty(t, takes, "the server has ended the session first")
			require.NoError(t, (<-takes).Unlock(t.Context()))

			link.Set(testserver.Pass)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
			require.NoError(t, theirs.Unlock(t.Context()))
		})
	}
}

// However a claim ends, its hold ends before its node goes.
func TestHoldsEndBeforeTheirNodes(t *testing.T) {
	t.Parallel()
	addr := []string{common.addr(t)}
	watcher := admin(t, addr...)
	for name, end := range map[string]func(*store){
		"expired": func(s *store) {
			s.mu.Lock()
			s.confirmed = s.confirmed.Add(-timeout)
			s.mu.Unlock()
			s.look()
		},
		"disconnected": func(s *store) { s.conn.Close() },
		"closed":       (*store).Close,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, session := connect(t, addr, timeout, nil)
			require.NoError(t, session.await(t.Context(), conn))
			s := newStore(conn, session, DefaultPrefix, zk.WorldACL(zk.PermAll))
			client := driver.NewClient(s)
			defer client.Close()
			name := unused(t)
			there := make(chan int, 1)
			_, err := s.Acquire(t.Context(), driver.Request{Name: name, Owner: client.NewOwner(), Lost: func(lock.Reason, error) {
				time.Sleep(50 * time.Millisecond) // in which a node that is removed would be gone
				there <- len(nodes(t, watcher, name))
			}})
			require.NoError(t, err)
			end(s)
			eventually(t, "the hold is lost", func() bool { return len(there) == 1 })
			require.Equal(t, 1, <-there)
			eventually(t, "the node is gone", func() bool { return len(nodes(t, watcher, name)) == 0 })
		})
	}
}

// A hold whose node is gone ends for that reason, and not because it is not certain any more.
func TestHoldWhoseNodeIsGoneIsNotExpired(t *testing.T) {
	t.Parallel()
	conn, session := connect(t, []string{common.addr(t)}, timeout, nil)
	require.NoError(t, session.await(t.Context(), conn))
	s := newStore(conn, session, DefaultPrefix, zk.WorldACL(zk.PermAll))
	defer s.Close()
	client := driver.NewClient(s)
	defer client.Close()
	var held driver.Claim
	until := make(chan time.Time, 1)
	held, err := s.Acquire(t.Context(), driver.Request{Name: unused(t), Owner: client.NewOwner(), Lost: func(lock.Reason, error) {
		until <- held.Until()
	}})
	require.NoError(t, err)
	path := held.(*claim).path
	require.NoError(t, conn.Delete(path, -1))
	require.ErrorIs(t, held.Extend(t.Context(), time.Second), lock.ErrLost)
	require.True(t, time.Now().Before(<-until))
}

// What is known of the session may be old when claims are looked at. A claim of the next session stays.
func TestClaimsOfALaterSessionStay(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	l := &listener{answers: make(map[int64][]byte)}
	conn, session := connect(t, []string{addr}, timeout, l.dial)
	require.NoError(t, session.await(t.Context(), conn))
	s := newStore(conn, session, DefaultPrefix, zk.WorldACL(zk.PermAll))
	client := driver.NewClient(s)
	defer client.Close()
	before, _ := session.state()
	require.NoError(t, l.end(addr, before.id))
	eventually(t, "there is another session", func() bool {
		now, _ := session.state()
		return now.connected && now.number > before.number
	})
	h := acquire(t, client.Lock(unused(t)))
	s.expire(before, nil)
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))
}

// A session that survives after all gives up what its client has lost.
func TestLostHoldsAreReleasedIfTheSessionSurvives(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	link := testserver.NewProxy(t, addr)
	a, b := openWith(t, []string{link.Addr}, 20*tick, nil), open(t, []string{addr})
	name := unused(t)
	h := acquire(t, a.Lock(name))
	id := a.conn.SessionID()
	link.Down()
	lost(t, h)
	link.Set(testserver.Pass)
	require.NoError(t, acquire(t, b.Lock(name)).Unlock(t.Context()))
	assert.Equal(t, id, a.conn.SessionID())
}

// leader returns the leader, and a follower.
func leader(t *testing.T, servers []*server) (leader, follower *server) {
	t.Helper()
	eventually(t, "there is a leader", func() bool {
		for _, s := range servers {
			switch s.mode() {
			case "leader":
				leader = s
			case "follower":
				follower = s
			}
		}
		return leader != nil && follower != nil
	})
	return leader, follower
}

// Holds and waiters survive the death of the leader and the stop of a server.
func TestFailover(t *testing.T) {
	t.Parallel()
	servers := ensemble(t, 3)
	const long = 20 * tick
	a, b := openWith(t, addrs(servers), long, nil), openWith(t, addrs(servers), long, nil)
	name := unused(t)
	h := acquire(t, a.Lock(name))
	waits := next(t, b, name)

	first, _ := leader(t, servers)
	first.stop()
	require.NoError(t, acquire(t, b.Lock(unused(t))).Unlock(t.Context()))
	require.NoError(t, h.Extend(t.Context(), time.Second))
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))
	after := <-waits
	assert.Greater(t, after.Token(), h.Token())
	require.NoError(t, first.start())
	require.NoError(t, first.await())

	// The server that a holder is connected to stops. It does not answer, and it does not close anything.
	waits = next(t, a, name)
	var stopped *server
	for _, s := range servers {
		if s.addr == b.conn.Server() {
			stopped = s
		}
	}
	stopped.signal(t, syscall.SIGSTOP)
	defer stopped.signal(t, syscall.SIGCONT)
	began := time.Now()
	eventually(t, "the client goes to another server", func() bool {
		now, _ := b.session.state()
		return now.connected && b.conn.Server() != stopped.addr
	})
	assert.Less(t, time.Since(began), 2*long/beats+2*slack)
	time.Sleep(time.Until(began.Add(long)))
	require.NoError(t, after.Context().Err(), "the hold is kept with another server")
	require.NoError(t, after.Unlock(t.Context()))
	third := <-waits
	assert.Greater(t, third.Token(), after.Token())
	require.NoError(t, third.Unlock(t.Context()))
}

// A server whose leader does not hear of it any more goes on answering pings and questions of its clients for longer than
// their sessions last. Their holds end in time.
func TestServerThatTheOthersHaveLeft(t *testing.T) {
	t.Parallel()
	type link struct{ from, to int }
	links := make(map[link]*testserver.Proxy)
	servers, err := newServers(t.TempDir(), 3, longLimit, func(from, to int, addr string) string {
		p := testserver.NewProxy(t, addr)
		links[link{from, to}] = p
		return p.Addr
	})
	require.NoError(t, err)
	run(t, servers)

	first, follower := leader(t, servers)
	a, b := open(t, []string{follower.addr}), open(t, []string{first.addr})
	other := admin(t, follower.addr)
	name := unused(t)
	h := acquire(t, a.Lock(name))
	takes := next(t, b, name)
	began := time.Now()
	links[link{slices.Index(servers, follower), slices.Index(servers, first)}].Set(testserver.Stall)

	assert.Equal(t, lock.ReasonExpired, lost(t, h).Reason)
	assert.Less(t, time.Since(began), timeout*3/4+slack)
	require.Empty(t, takes, "the server has ended the session first")
	require.NoError(t, (<-takes).Unlock(t.Context()))
	assert.Len(t, nodes(t, other, name), 2, "the server knows of nothing")
	assert.Less(t, time.Since(began), longLimit*tick)
	for _, p := range links {
		p.Set(testserver.Pass)
	}
}

// A leader that the others have left, and that does not know, answers a question about a node that they have. What a request
// without an answer has left there is removed nevertheless.
func TestLeftoverUnknownToAnOldLeader(t *testing.T) {
	t.Parallel()
	type link struct{ from, to int }
	links := make(map[link]*testserver.Proxy)
	servers, err := newServers(t.TempDir(), 3, syncLimit, func(from, to int, addr string) string {
		p := testserver.NewProxy(t, addr)
		links[link{from, to}] = p
		return p.Addr
	})
	require.NoError(t, err)
	const long, election = time.Minute, 30 * time.Second // in which servers wait 5 s for one that has stopped
	for _, s := range servers {
		s.configure(t, fmt.Sprintf("maxSessionTimeout=%d\n", long.Milliseconds()))
	}
	run(t, servers)
	old, follower := leader(t, servers)
	toOld, toFollower := testserver.NewProxy(t, old.addr), testserver.NewProxy(t, follower.addr)
	toOld.Down()
	a := openWith(t, []string{toFollower.Addr, toOld.Addr}, long, nil)
	name := unused(t)
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
	const kept = "kept" // or the server removes the folder, and the request fails
	_, err = admin(t, follower.addr).Create(DefaultPrefix+"/"+locks+"/"+name+"/"+kept, nil, 0, zk.WorldACL(zk.PermAll))
	require.NoError(t, err)

	for l, p := range links {
		if servers[l.to] == old {
			p.Set(testserver.Stall)
		}
	}
	old.signal(t, syscall.SIGSTOP)
	was, _ := a.session.state()
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(servers, func(s *server) bool { return s != old && s.mode() == "leader" })
	}, election, tick, "the others have a leader")
	other := admin(t, follower.addr)
	eventually(t, "there is a connection", func() bool { now, _ := a.session.state(); return now.connected })

	toFollower.Set(testserver.Mute)
	tried := make(chan error, 1)
	go func() {
		_, err := a.Lock(name).TryLock(context.Background())
		tried <- err
	}()
	eventually(t, "the node is there", func() bool { return len(nodes(t, other, name)) == 2 })
	toFollower.Set(testserver.Refuse)
	toOld.Set(testserver.Pass)
	old.signal(t, syscall.SIGCONT)
	toFollower.Cut()
	require.ErrorIs(t, <-tried, lock.ErrIndeterminate)
	eventually(t, "there is a connection", func() bool { now, _ := a.session.state(); return now.connected })
	eventually(t, "nothing is left", func() bool { return len(nodes(t, other, name)) == 1 })
	now, _ := a.session.state()
	assert.Equal(t, was.id, now.id, "the session has lasted")
}

// A client leaves a server that shows a node which the others do not have, and no other one.
func TestServerWithANodeThatTheOthersLack(t *testing.T) {
	t.Parallel()
	addr := common.addr(t)
	a, b := open(t, []string{addr}), open(t, []string{addr})
	name := unused(t)
	h := acquire(t, a.Lock(name))
	takes := next(t, b, name)
	const beat = timeout / beats
	_, changed := b.session.state()
	select {
	case <-changed:
		require.Fail(t, "the server is left")
	case <-time.After(2 * beat):
	}

	shown := &watch{changed: changed, answered: make(chan struct{}), events: make(chan zk.Event)}
	close(shown.answered)
	b.session.mu.Lock()
	stores := slices.Collect(maps.Keys(b.session.stores))
	b.session.mu.Unlock()
	s := stores[0]
	s.mu.Lock()
	s.watches[DefaultPrefix+"/"+locks+"/"+escape(name)+"/write_gone_1_0000000000"] = shown
	s.mu.Unlock()
	select {
	case <-changed:
	case <-time.After(2*beat + soon):
		require.Fail(t, "the server is not left")
	}
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, (<-takes).Unlock(t.Context()))
}

// A server that stops for longer than the session, alone: holds are lost, and everything goes on afterwards.
func TestServerThatStops(t *testing.T) {
	t.Parallel()
	servers := ensemble(t, 1)
	a, b := open(t, addrs(servers)), open(t, addrs(servers))
	name := unused(t)
	h := acquire(t, a.Lock(name))
	waits := next(t, b, name)
	servers[0].signal(t, syscall.SIGSTOP)
	_, err := b.Lock(unused(t)).Lock(t.Context(), lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrIndeterminate)
	assert.Equal(t, lock.ReasonExpired, lost(t, h).Reason)
	time.Sleep(timeout / 2)
	require.Empty(t, waits)
	servers[0].signal(t, syscall.SIGCONT)
	require.NoError(t, (<-waits).Unlock(t.Context()))
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))

	// And one that is killed, and starts again with what it has stored.
	h = acquire(t, a.Lock(name))
	waits = next(t, b, name)
	servers[0].stop()
	_, err = a.Lock(name).Lock(t.Context(), lock.FailFast())
	require.True(t, errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate), "%v", err)
	require.NoError(t, servers[0].start())
	require.NoError(t, servers[0].await())
	_ = h.Unlock(t.Context()) // the start may have taken longer than the session
	after := <-waits
	assert.Greater(t, after.Token(), h.Token())
	require.NoError(t, after.Unlock(t.Context()))
}

// Calls that do not wait return soon from a server that does not answer, even if nothing watches the connection.
func TestSilenceEndsCallsThatDoNotWait(t *testing.T) {
	t.Parallel()
	const long = 20 * tick
	link := testserver.NewProxy(t, common.addr(t))
	a := openWith(t, []string{link.Addr}, long, nil)
	name := unused(t)
	require.NoError(t, acquire(t, a.Lock(name)).Unlock(t.Context()))
	link.Set(testserver.Stall)
	defer link.Set(testserver.Pass)
	var done sync.WaitGroup
	for _, call := range []func() (lock.Hold, error){
		func() (lock.Hold, error) { return a.Lock(name).TryLock(context.Background()) },
		func() (lock.Hold, error) { return a.Lock(name).Lock(context.Background(), lock.FailFast()) },
	} {
		done.Go(func() {
			began := time.Now()
			_, err := call()
			assert.ErrorIs(t, err, lock.ErrIndeterminate)
			assert.NotErrorIs(t, err, context.DeadlineExceeded)
			assert.Less(t, time.Since(began), long/beats+slack)
		})
	}
	done.Wait()
}

// A server that has too many requests refuses some. Calls wait, and nothing stays.
func TestServerThatThrottles(t *testing.T) {
	t.Parallel()
	servers := ensemble(t, 1, "-Dzookeeper.request_throttle_max_requests=1", "-Dzookeeper.request_throttle_stall_time=2",
		"-Dzookeeper.throttled_op_wait_time=1")
	name := unused(t)
	var done sync.WaitGroup
	for range 4 {
		p := open(t, addrs(servers))
		for range 4 {
			done.Go(func() {
				for range 25 {
					h, err := p.Lock(name).Lock(t.Context(), lock.Wait(3*soon))
					if assert.NoError(t, err) {
						assert.NoError(t, h.Unlock(t.Context()))
					}
				}
			})
		}
	}
	done.Wait()
	assert.NotContains(t, servers[0].ask("mntr"), "zk_throttled_ops\t0\n")
	watcher := admin(t, servers[0].addr)
	eventually(t, "nothing is left", func() bool {
		names, _, err := watcher.Children(DefaultPrefix + "/" + locks + "/" + escape(name))
		return err == zk.ErrNoNode || err == nil && len(names) == 0
	})
}

// workerEnv is set for the process that holds a lock.
const workerEnv = "ZKLOCK_WORKER"

// work holds a lock, tells its token, and then whether the hold is lost, when it gets a line.
func work(servers string) {
	addr, name, _ := strings.Cut(servers, " ")
	session := NewSession(nil)
	conn, _, err := zk.Connect([]string{addr}, timeout, zk.WithDialer(session.Dial), zk.WithLogger(silent{}))
	if err != nil {
		panic(err)
	}
	client, err := New(context.Background(), conn, session)
	if err != nil {
		panic(err)
	}
	h, err := client.Lock(name).Lock(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println(h.Token())
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	<-h.Context().Done()
	fmt.Println(context.Cause(h.Context()))
	client.Close()
	conn.Close()
}

// A process is stopped for longer than its session. Its token is too old then.
func TestProcessThatStops(t *testing.T) {
	t.Parallel()
	b := open(t, []string{common.addr(t)})
	name := unused(t)
	worker := exec.Command(os.Args[0])
	worker.Env = append(os.Environ(), workerEnv+"="+common.addr(t)+" "+name)
	in, err := worker.StdinPipe()
	require.NoError(t, err)
	out, err := worker.StdoutPipe()
	require.NoError(t, err)
	worker.Stderr = os.Stderr
	require.NoError(t, worker.Start())
	lines := bufio.NewReader(out)
	defer func() {
		_ = worker.Process.Kill()
		_ = worker.Wait()
	}()
	var token int64
	_, err = fmt.Fscanln(lines, &token)
	require.NoError(t, err)

	require.NoError(t, worker.Process.Signal(syscall.SIGSTOP))
	h, err := b.Lock(name).Lock(t.Context(), lock.Wait(timeout+2*tick+slack))
	require.NoError(t, err)
	assert.Greater(t, h.Token(), token)
	require.NoError(t, worker.Process.Signal(syscall.SIGCONT))
	_, err = in.Write([]byte("\n"))
	require.NoError(t, err)
	why, err := lines.ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, why, lock.ErrLost.Error())
	require.NoError(t, h.Context().Err())
	require.NoError(t, h.Unlock(t.Context()))
}
