package zklock

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime/pprof"
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
)

// faults is the duration of TestHistory. Ten minutes are
//
//	go test -race -run TestHistory -faults 10m -timeout 15m -v
var faults = flag.Duration("faults", 0, "how long TestHistory has faults happen; by default a minute, and 10s with -short")

// outcome is what has become of one call of Lock.
type outcome struct {
	Token      int64     // 0: the call has failed
	Begin, End time.Time // of a time during which the holder could be sure of the lock
	Lost       bool      // it could not at End
	Refused    bool      // the resource has refused a write before End
	Wrong      string    // an error that should not be
}

// contend acquires a lock until ctx ends, and writes under it, sometimes for longer than a session lasts without a
// connection. It also writes when it has lost the lock.
func contend(ctx context.Context, l lock.Locker, write func(token int64) (accepted bool), report func(outcome)) {
	for ctx.Err() == nil {
		h, err := l.Lock(ctx, lock.Wait(time.Second), lock.Parent(context.Background()))
		if err != nil {
			report(outcome{Wrong: wrong(err, lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate)})
			continue
		}

		o := outcome{Token: h.Token(), Begin: time.Now().Round(0)}
		first := write(o.Token)
		time.Sleep(rand.N(3 * time.Millisecond))
		if rand.N(100) == 0 {
			select {
			case <-h.Context().Done():
				time.Sleep(timeout) // it does not notice
			case <-time.After(2 * timeout):
			}
		}
		last := write(o.Token)
		o.Refused = !first || !last
		o.End = time.Now().Round(0)
		o.Lost = h.Remaining() == 0
		o.Wrong = wrong(h.Unlock(context.Background()), nil, lock.ErrLost, lock.ErrIndeterminate)
		report(o)
	}
}

// wrong returns the text of an error that is none of those.
func wrong(err error, expected ...error) string {
	if slices.ContainsFunc(expected, func(e error) bool { return errors.Is(err, e) }) {
		return ""
	}
	return err.Error()
}

// history is what contenders have done with a lock, and the resource that it protects.
type history struct {
	mu       sync.Mutex
	last     int64 // token that the resource has seen
	stale    int   // writes that it has refused
	outcomes []outcome
}

func (h *history) write(token int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if token < h.last {
		h.stale++
		return false
	}
	h.last = token
	return true
}

func (h *history) report(o outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outcomes = append(h.outcomes, o)
}

// holds returns how many holds there were.
func (h *history) holds() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.outcomes {
		if o.Token != 0 {
			n++
		}
	}
	return n
}

// check fails the test if holds overlap, their tokens do not grow, or the resource has refused a holder.
func (h *history) check(t *testing.T) {
	var held []outcome
	lost, failed := 0, 0
	for _, o := range h.outcomes {
		assert.Empty(t, o.Wrong)
		if o.Token == 0 {
			failed++
		} else if o.Lost {
			lost++
		} else {
			held = append(held, o)
			assert.False(t, o.Refused, "the resource has refused the holder with the token %d", o.Token)
		}
	}
	t.Logf("%d holds, %d of them lost, %d failed calls, %d stale writes refused", len(held)+lost, lost, failed, h.stale)

	require.NotEmpty(t, held)
	slices.SortFunc(held, func(a, b outcome) int { return a.Begin.Compare(b.Begin) })
	for i, o := range held[1:] {
		before := held[i]
		if o.Begin.Before(before.End) || o.Token <= before.Token {
			t.Errorf("token %d follows %d, and begins %v after its end", o.Token, before.Token, o.Begin.Sub(before.End))
		}
	}
}

// message is what a process of contenders says: it asks for a write, or reports.
type message struct {
	Write   int64 `json:",omitempty"`
	Outcome *outcome
}

// reply is the answer to a write.
type reply struct{ Accepted, Done bool }

// contenderEnv is set for the process that contends: to the addresses of the servers, and the name of the lock.
const contenderEnv = "ZKLOCK_CONTENDER"

// contendFor contends for a lock until a reply says that it is done.
func contendFor(args string) {
	servers, name, _ := strings.Cut(args, " ")
	session := NewSession((&listener{answers: make(map[int64][]byte)}).dial)
	conn, _, err := zk.Connect(strings.Split(servers, ","), timeout, zk.WithDialer(session.Dial), zk.WithLogger(silent{}))
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	client, err := New(context.Background(), conn, session)
	if err != nil {
		panic(err)
	}
	defer client.Close()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	contend(ctx, client.Lock(name), func(token int64) bool {
		var r reply
		if err := errors.Join(out.Encode(message{Write: token}), in.Decode(&r)); err != nil {
			panic(err)
		}
		if r.Done {
			cancel()
		}
		return r.Accepted
	}, func(o outcome) {
		if err := out.Encode(message{Outcome: &o}); err != nil {
			panic(err)
		}
	})
}

// contender is a process that contends.
type contender struct {
	*exec.Cmd
	stop chan struct{} // has the process stopped while it holds the lock
}

// startContender starts a process that contends for a lock until ctx ends. done gets what its output ends with.
func startContender(ctx context.Context, t *testing.T, servers []string, name string, h *history) (c *contender, done <-chan error) {
	t.Helper()
	c = &contender{Cmd: exec.Command(os.Args[0]), stop: make(chan struct{})}
	c.Env = append(os.Environ(), contenderEnv+"="+strings.Join(servers, ",")+" "+name)
	c.Stderr = os.Stderr
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	stdout, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})

	ended := make(chan error, 1)
	in, out := json.NewDecoder(stdout), json.NewEncoder(stdin)
	go func() {
		for {
			var m message
			err := in.Decode(&m)
			if m.Outcome != nil {
				h.report(*m.Outcome)
			} else if err == nil {
				accepted := h.write(m.Write)
				select {
				case <-c.stop:
					err = c.Process.Signal(syscall.SIGSTOP)
				default:
				}
				err = errors.Join(err, out.Encode(reply{Accepted: accepted, Done: ctx.Err() != nil}))
			}
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	return c, ended
}

// Holds never overlap, whatever happens to servers, connections, sessions and processes, and their tokens grow. A resource
// that checks tokens refuses no holder.
func TestHistory(t *testing.T) {
	t.Parallel()
	length := *faults
	if length == 0 && testing.Short() {
		length = 10 * time.Second
	} else if length == 0 {
		length = time.Minute
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	type link struct{ from, to int }
	between := make(map[link]*testserver.Proxy)
	servers, err := newServers(t.TempDir(), 3, syncLimit, func(from, to int, addr string) string {
		p := testserver.NewProxy(t, addr)
		between[link{from, to}] = p
		return p.Addr
	})
	require.NoError(t, err)
	run(t, servers)

	name := unused(t)
	ctx, stop := context.WithTimeout(t.Context(), length)
	defer stop()
	var (
		h      history
		done   sync.WaitGroup
		latest atomic.Int64 // client of this process that has acquired the lock
	)
	passwords := &listener{answers: make(map[int64][]byte)}
	clients := make([]*process, 4)
	links := make([][]*testserver.Proxy, len(clients))
	for i := range clients {
		var behind []string
		for _, s := range servers {
			p := testserver.NewProxy(t, s.addr)
			links[i] = append(links[i], p)
			behind = append(behind, p.Addr)
		}
		clients[i] = openWith(t, behind, timeout, passwords.dial)
		for range 2 {
			done.Go(func() {
				contend(ctx, clients[i].Lock(name), func(token int64) bool {
					latest.Store(int64(i))
					return h.write(token)
				}, h.report)
			})
		}
	}
	other, ended := startContender(ctx, t, addrs(servers), name, &h)
	defer func() {
		if t.Failed() {
			explain(t, servers, clients, name)
		}
	}()

	// One fault at a time, with a pause, so that a majority of the servers goes on.
	happened := make(map[string]int)
	for ctx.Err() == nil {
		before := h.holds()
		sleep(ctx, time.Second)
		for deadline := time.Now().Add(3 * soon); h.holds() == before && ctx.Err() == nil; sleep(ctx, 50*time.Millisecond) {
			require.True(t, time.Now().Before(deadline), "nobody acquires the lock")
		}
		first, _ := leader(t, servers)
		pause := time.Duration(random.Int64N(int64(2 * timeout)))
		client := latest.Load()
		each := func(do func(p *testserver.Proxy)) {
			for _, p := range links[client] {
				do(p)
			}
		}
		have := func(faults testserver.Fault) { each(func(p *testserver.Proxy) { p.Set(faults) }) }
		var what string
		switch random.IntN(9) {
		case 0:
			what = "leader killed"
			first.stop()
			sleep(ctx, pause)
			require.NoError(t, first.start())
			require.NoError(t, first.await())
		case 1:
			what = "leader stopped"
			first.signal(t, syscall.SIGSTOP)
			sleep(ctx, pause)
			first.signal(t, syscall.SIGCONT)
		case 2:
			what = "leader apart from the others"
			for l, p := range between {
				if servers[l.from] == first || servers[l.to] == first {
					p.Set(testserver.Stall)
				}
			}
			sleep(ctx, pause)
			for _, p := range between {
				p.Set(testserver.Pass)
			}
		case 3:
			what = "holder stopped"
			select {
			case other.stop <- struct{}{}:
				sleep(ctx, timeout+pause/2)
				require.NoError(t, other.Process.Signal(syscall.SIGCONT))
			case <-ctx.Done():
			}
		case 4:
			what = "connections cut"
			each((*testserver.Proxy).Cut)
		case 5:
			what = "session ended"
			if err := passwords.end(first.addr, clients[client].conn.SessionID()); err != nil {
				what = "no session to end"
			}
		case 6:
			what = "client cut off"
			each((*testserver.Proxy).Down)
			sleep(ctx, timeout+pause/2)
			have(testserver.Pass)
		case 7:
			what = "client stalled"
			have(testserver.Stall)
			sleep(ctx, timeout+pause/2)
			have(testserver.Pass)
		case 8:
			what = "replies lost"
			have(testserver.Mute)
			sleep(ctx, pause/8)
			have(testserver.Pass)
			each((*testserver.Proxy).Cut)
		}
		happened[what]++
	}
	done.Wait()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, io.EOF)
	case <-time.After(3 * soon):
		require.Fail(t, "the other process does not acquire the lock")
	}

	t.Logf("faults: %v", happened)
	h.check(t)
	last := open(t, addrs(servers))
	clients = append(clients, last)
	require.NoError(t, acquire(t, last.Lock(name)).Unlock(t.Context()))
	first, _ := leader(t, servers)
	for _, s := range servers {
		conn := admin(t, s.addr)
		if s == first {
			eventually(t, "nothing is left", func() bool { return len(nodes(t, conn, name)) == 0 })
		} else if left := nodes(t, conn, name); len(left) > 0 { // or it is a little late
			t.Logf("%s has missed transactions, and shows %d nodes", s.addr, len(left))
		}
	}
}

// explain logs what each server and each client knows of a lock, and what the goroutines of the clients are at.
func explain(t *testing.T, servers []*server, clients []*process, name string) {
	folder := DefaultPrefix + "/" + locks + "/" + escape(name)
	for _, s := range servers {
		conn := admin(t, s.addr)
		names, _, err := conn.Children(folder)
		t.Logf("server %s (%s) has %d nodes, error %v\n%s", s.addr, s.mode(), len(names), err, s.ask("dump"))
		for _, name := range names {
			if _, stat, err := conn.Exists(folder + "/" + name); err == nil {
				t.Logf("%s: session 0x%x, created by 0x%x", name, stat.EphemeralOwner, stat.Czxid)
			}
		}
	}

	for _, p := range clients {
		now, changed := p.session.state()
		t.Logf("client of session 0x%x by %s: %+v", p.conn.SessionID(), p.conn.Server(), now)
		p.session.mu.Lock()
		stores := slices.Collect(maps.Keys(p.session.stores))
		p.session.mu.Unlock()
		for _, s := range stores {
			s.mu.Lock()
			for path, c := range s.claims {
				t.Logf("its claim %s: session %d, held %v", path, c.session, c.held)
			}
			for path, w := range s.watches {
				t.Logf("its watch %s: over %v, of this connection %v", path, w.over(), w.changed == changed)
			}
			s.mu.Unlock()
		}
	}

	var stacks strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
	t.Log(stacks.String())
}

// sleep sleeps for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
