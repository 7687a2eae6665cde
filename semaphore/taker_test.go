package semaphore_test

import (
	"context"
	"encoding/hex"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

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

// filesOf returns what a script is made of.
func filesOf(file string) []string {
	switch {
	case file == "permit_extend.lua" || file == "permit_left.lua":
		return []string{"permits.lua", file}
	case file == "permit_counts.lua" || file == "permit_renew.lua":
		return []string{file}
	case strings.HasPrefix(file, "permit_"):
		return []string{"pool.lua", "permits.lua", file}
	default:
		return []string{"pool.lua", file}
	}
}

// nameOf returns the name that servers have for a script.
func nameOf(t testing.TB, file string) string { return harness.SHA(t, filesOf(file)...) }

// loadScripts makes a server know the scripts, so that a request is one command.
func loadScripts(t testing.TB, addr string) {
	t.Helper()
	files, err := filepath.Glob("*.lua")
	require.NoError(t, err)
	for _, file := range files {
		if file != "pool.lua" && file != "permits.lua" {
			harness.Load(t, addr, filesOf(file)...)
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

// standsInLine returns how many clients stand in line.
func standsInLine(t testing.TB, addr, name string) string {
	t.Helper()
	return harness.Do(t, addr, "ZCARD", wire.SemaphoreWaiting(name))
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

// blocked reports whether CLIENT PAUSE keeps a request waiting.
func blocked(t testing.TB, addr string) bool {
	t.Helper()
	clients, err := testserver.Query(addr, "CLIENT", "LIST")
	require.NoError(t, err)
	return strings.Contains(strings.Join(clients, ""), "flags=b")
}
