package semaphore_test

import (
	"context"
	"crypto/sha1" // the server names scripts by their SHA-1
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// Bounds that hold on a busy machine.
const (
	faultSoon = 10 * time.Second
	// faultSlack is what a wait may take beyond what the protocol says.
	faultSlack = 3 * time.Second
)

// faultQuietly is for clients whose logs are of no interest.
var faultQuietly = redlatch.WithLogger(slog.New(slog.DiscardHandler))

// The kinds of semaphore.
const (
	plainKind     = "plain"
	expirableKind = "expirable"
)

var faultKinds = []string{plainKind, expirableKind}

// sourceOf returns a script as it is sent, by the name of its file.
func sourceOf(t testing.TB, file string) string {
	t.Helper()
	files := []string{file}
	switch file {
	case "permit_extend.lua", "permit_left.lua":
		files = []string{"permits.lua", file}
	case "permit_counts.lua", "permit_renew.lua":
	default:
		files = []string{"pool.lua", file}
		if strings.HasPrefix(file, "permit_") {
			files = []string{"pool.lua", "permits.lua", file}
		}
	}
	var source strings.Builder
	for _, f := range files {
		part, err := os.ReadFile(f)
		require.NoError(t, err)
		source.Write(part)
	}
	return source.String()
}

// nameOf returns the name that the server has for a script.
func nameOf(t testing.TB, file string) string {
	t.Helper()
	sum := sha1.Sum([]byte(sourceOf(t, file)))
	return hex.EncodeToString(sum[:])
}

// loadScripts makes a server know the scripts, so that a request is one command.
func loadScripts(t testing.TB, addr string) {
	t.Helper()
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".lua") && f.Name() != "pool.lua" && f.Name() != "permits.lua" {
			harness.Do(t, addr, "SCRIPT", "LOAD", sourceOf(t, f.Name()))
		}
	}
}

// taker is a semaphore of either kind in the hands of one client, with what that has
// taken.
type taker struct {
	addr, name string
	plain      *semaphore.Semaphore
	expirable  *semaphore.Expirable // nil: the other

	mu      sync.Mutex
	out     int
	permits []*semaphore.Permit
}

func takerOf(c *redlatch.Client, s *testserver.Server, kind, name string) *taker {
	k := &taker{addr: s.Addr, name: name}
	if kind == expirableKind {
		k.expirable = c.PermitSemaphore(name)
	} else {
		k.plain = c.Semaphore(name)
	}
	return k
}

// set makes the semaphore.
func (k *taker) set(ctx context.Context, permits int) (bool, error) {
	if k.expirable != nil {
		return k.expirable.TrySetPermits(ctx, permits)
	}
	return k.plain.TrySetPermits(ctx, permits)
}

func (k *taker) add(ctx context.Context, delta int) error {
	if k.expirable != nil {
		return k.expirable.AddPermits(ctx, delta)
	}
	return k.plain.AddPermits(ctx, delta)
}

func (k *taker) acquire(ctx context.Context, n int, opts ...lock.Option) error {
	if k.expirable != nil {
		return k.taken(k.expirable.AcquireN(ctx, n, opts...))
	}
	return k.took(n, k.plain.Acquire(ctx, n, opts...))
}

func (k *taker) try(ctx context.Context, n int) error {
	if k.expirable != nil {
		return k.taken(k.expirable.TryAcquireN(ctx, n))
	}
	return k.took(n, k.plain.TryAcquire(ctx, n))
}

func (k *taker) taken(permits []*semaphore.Permit, err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.permits = append(k.permits, permits...)
	return err
}

func (k *taker) took(n int, err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		k.out += n
	}
	return err
}

// held returns how many permits it has, and their ids.
func (k *taker) held() (n int, ids []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.permits {
		ids = append(ids, p.ID())
	}
	return k.out + len(ids), ids
}

// forget says that it has nothing any more.
func (k *taker) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.out, k.permits = 0, nil
}

// release gives everything back in one request.
func (k *taker) release(ctx context.Context) error {
	k.mu.Lock()
	out, permits := k.out, k.permits
	k.mu.Unlock()
	k.forget()
	switch {
	case k.expirable == nil:
		return k.plain.Release(ctx, out)
	case len(permits) == 1:
		return permits[0].Release(ctx)
	}
	var ids []string
	for _, p := range permits {
		ids = append(ids, p.ID())
	}
	return k.expirable.Release(ctx, ids...)
}

// free returns how many permits the server has as free.
func (k *taker) free(t testing.TB) int {
	t.Helper()
	reply, err := testserver.Query(k.addr, "GET", k.name)
	require.NoError(t, err)
	n, _ := strconv.Atoi(reply[0]) // "" for none
	return n
}

// requireExact fails the test unless the server has total permits, of which those
// that the clients know of are taken, and no others. Nothing is under way.
func requireExact(t testing.TB, total int, clients ...*taker) {
	t.Helper()
	out, ids := 0, []string{}
	for _, k := range clients {
		n, own := k.held()
		out, ids = out+n, append(ids, own...)
	}
	k := clients[0]
	require.Equal(t, total-out, k.free(t), "%s: free permits", k.name)
	if k.expirable == nil {
		return
	}
	members, err := testserver.Query(k.addr, "ZRANGE", wire.PermitTimeouts(k.name), "0", "-1")
	require.NoError(t, err)
	taken := []string{}
	for _, m := range members {
		taken = append(taken, hex.EncodeToString([]byte(m)))
	}
	require.ElementsMatch(t, ids, taken, "%s: permits that are taken", k.name)
}

// settled waits until no client does anything in the background.
func settled(t testing.TB) {
	t.Helper()
	harness.Eventually(t, time.Minute, "nothing is done in the background", func() bool {
		return harness.GoroutinesNotBegun() == 0 && harness.GoroutinesIn("(*pool).settle") == 0
	})
}

// standsInLine returns how many clients stand in line.
func standsInLine(t testing.TB, addr, name string) string {
	t.Helper()
	return harness.Do(t, addr, "ZCARD", wire.SemaphoreWaiting(name))
}

// awaitPlace waits until a client stands in line: then its first request makes no
// attempt without a message for a while.
func awaitPlace(t testing.TB, addr, name string) {
	t.Helper()
	harness.Eventually(t, faultSoon, "a client is in line", func() bool { return standsInLine(t, addr, name) == ":1" })
	harness.Eventually(t, faultSoon, "it sleeps", func() bool { return harness.GoroutinesIn("(*Waiter).attempt") == 0 })
}

// start begins to wait for n permits.
func (k *taker) start(ctx context.Context, n int, opts ...lock.Option) <-chan error {
	done := make(chan error, 1)
	go func() { done <- k.acquire(ctx, n, opts...) }()
	return done
}

// await returns the end of a wait.
func await(t testing.TB, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(30 * time.Second):
		require.FailNow(t, "a waiter hangs")
		return nil
	}
}

// line starts waiters for one permit each and returns when the first stands in line
// and the others behind it.
func (k *taker) line(t testing.TB, n int) []<-chan error {
	t.Helper()
	waiters := []<-chan error{k.start(context.Background(), 1)}
	awaitPlace(t, k.addr, k.name)
	for range n - 1 {
		waiters = append(waiters, k.start(context.Background(), 1))
	}
	harness.Eventually(t, faultSoon, "all wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == n })
	return waiters
}

// blocked reports whether CLIENT PAUSE keeps a request waiting.
func blocked(t testing.TB, addr string) bool {
	t.Helper()
	clients, err := testserver.Query(addr, "CLIENT", "LIST")
	require.NoError(t, err)
	return strings.Contains(strings.Join(clients, ""), "flags=b")
}

// gatedFor returns a client behind a gate that notices soon when a server is silent.
func gatedFor(t testing.TB, s *testserver.Server, opts ...redlatch.Option) (*redlatch.Client, *harness.Gate) {
	t.Helper()
	g := harness.NewGate(t, s)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{g.Addr}, ConnWriteTimeout: time.Second, Dialer: net.Dialer{KeepAlive: 200 * time.Millisecond},
	}, append(opts, faultQuietly)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	t.Cleanup(func() { _ = g.Open() })
	return c, g
}

const fateTotal = 10 // permits

// fateCase is one case of TestEveryFateOfEveryRequest.
type fateCase struct {
	*testing.T
	kind        string
	fate        harness.Fate
	c           *redlatch.Client
	g           *harness.Gate
	mine, other *taker // the other client is not behind the gate
	total       int    // of the semaphore, in the end
	ctx         context.Context
}

// file returns the script that does something for the kind of semaphore.
func (a *fateCase) file(script string) string {
	if a.kind == expirableKind {
		return "permit_" + script
	}
	return script
}

// during runs what sends the request of that script, and opens the gate for a reply
// that is kept back.
func (a *fateCase) during(file string, operation func()) {
	a.Helper()
	reached := a.g.Arm(a.fate, nameOf(a, file), 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		operation()
	}()
	select {
	case <-reached:
	case <-time.After(faultSoon):
		require.FailNow(a, "the request was not sent")
	}
	if a.fate == harness.KeepReply {
		require.NoError(a, a.g.Open())
	}
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		require.FailNow(a, "it hangs")
	}
}

// all takes everything for the other client.
func (a *fateCase) all() { require.NoError(a, a.other.try(a.ctx, fateTotal)) }

type fateOperation struct {
	name  string
	kinds []string
	alone bool // not while other cases run: it looks at goroutines
	run   func(a *fateCase)
}

var fateOperations = []fateOperation{
	{"try", faultKinds, false, func(a *fateCase) {
		var err error
		a.during(a.file("acquire.lua"), func() { err = a.mine.try(a.ctx, 3) })
		if a.fate.Unknown() {
			require.ErrorIs(a, err, lock.ErrIndeterminate)
			require.NotErrorIs(a, err, lock.ErrNotAcquired)
			return
		}
		require.NoError(a, err)
	}},
	{"wait", faultKinds, true, func(a *fateCase) {
		a.all()
		waiter := a.mine.start(a.ctx, 2)
		awaitPlace(a, a.mine.addr, a.mine.name)
		a.during(a.file("acquire.lua"), func() { require.NoError(a, a.other.release(a.ctx)) })
		require.NoError(a, await(a, waiter))
	}},
	{"wait of several", faultKinds, true, func(a *fateCase) {
		a.all()
		waiters := a.mine.line(a, 4)
		a.during(a.file("acquire.lua"), func() { require.NoError(a, a.other.release(a.ctx)) })
		for _, w := range waiters {
			require.NoError(a, await(a, w))
		}
	}},
	{"release", faultKinds, false, func(a *fateCase) {
		kept := takerOf(a.c, &testserver.Server{Addr: a.mine.addr}, a.kind, a.mine.name)
		require.NoError(a, kept.try(a.ctx, 2))
		require.NoError(a, a.mine.try(a.ctx, 1))
		var err error
		a.during(a.file("release.lua"), func() { err = a.mine.release(a.ctx) })
		require.NoError(a, err)
		a.mine = kept
	}},
	{"release of several", faultKinds, false, func(a *fateCase) {
		require.NoError(a, a.mine.try(a.ctx, 4))
		var err error
		a.during(a.file("release.lua"), func() { err = a.mine.release(a.ctx) })
		require.NoError(a, err)
	}},
	{"release for others of the process", faultKinds, true, func(a *fateCase) {
		require.NoError(a, a.mine.try(a.ctx, fateTotal))
		heirs := takerOf(a.c, &testserver.Server{Addr: a.mine.addr}, a.kind, a.mine.name)
		waiters := heirs.line(a, 3)
		var err error
		a.during(a.file("release.lua"), func() { err = a.mine.release(a.ctx) })
		require.NoError(a, err)
		for _, w := range waiters {
			require.NoError(a, await(a, w))
		}
		a.mine = heirs
	}},
	{"set", faultKinds, false, func(a *fateCase) {
		harness.Do(a, a.mine.addr, "DEL", a.mine.name)
		var made bool
		var err error
		a.during("set.lua", func() { made, err = a.mine.set(a.ctx, 7) })
		require.NoError(a, err)
		require.True(a, made)
		a.total = 7
	}},
	{"add", faultKinds, false, func(a *fateCase) {
		a.during("add.lua", func() { require.NoError(a, a.mine.add(a.ctx, 5)) })
		a.total += 5
	}},
	{"take away", faultKinds, false, func(a *fateCase) {
		a.during("add.lua", func() { require.NoError(a, a.mine.add(a.ctx, -4)) })
		a.total -= 4
	}},
	{"drain", []string{plainKind}, false, func(a *fateCase) {
		var n int
		var err error
		a.during("drain.lua", func() { n, err = a.mine.plain.Drain(a.ctx) })
		require.NoError(a, err)
		require.Equal(a, fateTotal, n)
		a.total = 0
	}},
	{"set the sum", []string{expirableKind}, false, func(a *fateCase) {
		require.NoError(a, a.mine.try(a.ctx, 4))
		a.during("permit_set.lua", func() { require.NoError(a, a.mine.expirable.SetPermits(a.ctx, 6)) })
		a.total = 6
	}},
	{"calling off", faultKinds, true, func(a *fateCase) {
		// The attempt is on its way when its caller leaves; it runs before it is called off.
		ctx, cancel := context.WithCancel(a.ctx)
		harness.Do(a, a.mine.addr, "CLIENT", "PAUSE", "300", "WRITE")
		a.during(a.file("undo.lua"), func() {
			done := make(chan error, 1)
			go func() { done <- a.mine.try(ctx, 3) }()
			harness.Eventually(a, faultSoon, "it is asked for", func() bool { return blocked(a, a.mine.addr) })
			cancel()
			err := await(a, done)
			require.ErrorIs(a, err, lock.ErrIndeterminate)
			require.ErrorIs(a, err, context.Canceled)
		})
	}},
	{"leaving the line", faultKinds, true, func(a *fateCase) {
		a.all()
		ctx, cancel := context.WithCancel(a.ctx)
		waiter := a.mine.start(ctx, 2)
		awaitPlace(a, a.mine.addr, a.mine.name)
		a.during("leave.lua", func() {
			cancel()
			require.ErrorIs(a, await(a, waiter), lock.ErrNotAcquired)
		})
		require.NoError(a, a.other.release(a.ctx))
	}},
	{"renewal", []string{expirableKind}, false, func(a *fateCase) {
		require.NoError(a, a.mine.try(a.ctx, 1))
		p := a.mine.permits[0]
		first := time.Now().Add(p.Remaining())
		a.during("permit_renew.lua", func() {
			harness.Eventually(a, renewedTimeout, "the lease is renewed", func() bool {
				return time.Now().Add(p.Remaining()).After(first.Add(renewedTimeout / 4))
			})
		})
		a.sure(p)
	}},
	{"extension", []string{expirableKind}, false, func(a *fateCase) {
		require.NoError(a, a.mine.acquire(a.ctx, 1, lock.Lease(30*time.Second)))
		p := a.mine.permits[0]
		var err error
		a.during("permit_extend.lua", func() { err = p.Extend(a.ctx, time.Minute) })
		if a.fate.Unknown() {
			require.Error(a, err)
			require.NotErrorIs(a, err, lock.ErrLost)
			require.NotErrorIs(a, err, lock.ErrNotHeld)
			a.sure(p)
			require.NoError(a, p.Extend(a.ctx, time.Minute))
		} else {
			require.NoError(a, err)
		}
		require.Greater(a, p.Remaining(), 40*time.Second)
		a.sure(p)
	}},
	{"another lease", []string{expirableKind}, false, func(a *fateCase) {
		require.NoError(a, a.mine.acquire(a.ctx, 1, lock.Lease(30*time.Second)))
		p := a.mine.permits[0]
		for _, lease := range []time.Duration{time.Minute, 20 * time.Second} {
			var taken bool
			var err error
			a.during("permit_extend.lua", func() { taken, err = a.mine.expirable.UpdateLeaseTime(a.ctx, p.ID(), lease) })
			if a.fate.Unknown() {
				require.Error(a, err)
				require.LessOrEqual(a, p.Remaining(), min(lease, 30*time.Second))
			} else {
				require.NoError(a, err)
				require.True(a, taken)
				require.Greater(a, p.Remaining(), lease-faultSlack)
			}
			a.sure(p)
			require.NoError(a, a.g.Open())
		}
	}},
}

// renewedTimeout is the watchdog timeout where renewals are looked at.
const renewedTimeout = 2 * time.Second

// sure checks that a permit is held, and its client no more certain of it than the
// server.
func (a *fateCase) sure(p *semaphore.Permit) {
	a.Helper()
	require.NoError(a, p.Context().Err())
	asked := time.Now()
	remaining := p.Remaining()
	left, err := a.other.expirable.LeaseTime(a.ctx, p.ID())
	require.NoError(a, err)
	took := time.Since(asked) // by which both have come down meanwhile
	require.LessOrEqual(a, remaining, left+took+10*time.Millisecond, "the clocks of both are the same")
	require.Positive(a, remaining)
}

// Whatever becomes of a request, it takes effect once or not at all, and the caller
// hears which, if it can be known.
func TestEveryFateOfEveryRequest(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		other := harness.Client(t, s)
		for _, op := range fateOperations {
			t.Run(op.name, func(parent *testing.T) {
				var cases []*fateCase
				parent.Run("all", func(all *testing.T) {
					for _, fate := range harness.Fates {
						for _, kind := range op.kinds {
							name := fmt.Sprintf("%s, %v, %s", op.name, fate, kind)
							var opts []redlatch.Option
							if op.name == "renewal" {
								opts = append(opts, redlatch.WithWatchdogTimeout(renewedTimeout))
							}
							c, g := gatedFor(parent, s, opts...)
							a := &fateCase{kind: kind, fate: fate, c: c, g: g, total: fateTotal, ctx: context.Background()}
							a.mine, a.other = takerOf(c, s, kind, name), takerOf(other, s, kind, name)
							made, err := a.other.set(a.ctx, fateTotal)
							require.NoError(parent, err)
							require.True(parent, made)
							cases = append(cases, a)
							all.Run(fate.String()+", "+kind, func(t *testing.T) {
								if !op.alone {
									t.Parallel()
								}
								a.T = t
								op.run(a)
								if op.alone {
									settled(t)
								}
							})
						}
					}
				})
				settled(parent)
				for _, a := range cases {
					require.NoError(parent, a.g.Open()) // what was delayed arrives now
					requireExact(parent, a.total, a.mine, a.other)
					require.Equal(parent, ":0", standsInLine(parent, s.Addr, a.mine.name))
					for _, k := range []*taker{a.mine, a.other} {
						if n, _ := k.held(); n > 0 {
							require.NoError(parent, k.release(a.ctx), k.name)
						}
					}
					requireExact(parent, a.total, a.mine, a.other)
					harness.Do(parent, s.Addr, "DEL", a.mine.name)
				}
				harness.NothingStays(parent, s.Addr)
			})
		}
	})
}
