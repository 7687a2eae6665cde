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

// outageSlack is how late a busy machine may be.
const outageSlack = 3 * time.Second

// quiet discards the logs of a client.
var quiet = redlatch.WithLogger(slog.New(slog.DiscardHandler))

// The kinds of taker.
const (
	plainKind  = "plain"
	permitKind = "permit"
)

var takerKinds = []string{plainKind, permitKind}

// scriptFiles returns the files of a script.
func scriptFiles(file string) []string {
	switch {
	case file == "permit_extend.lua" || file == "permit_left.lua":
		return []string{"permits.lua", file}
	case file == "stats.lua" || file == "permit_renew.lua":
		return []string{file}
	case strings.HasPrefix(file, "permit_"):
		return []string{"pool.lua", "permits.lua", file}
	default:
		return []string{"pool.lua", file}
	}
}

// sha returns the SHA of a script.
func sha(t testing.TB, file string) string { return harness.SHA(t, scriptFiles(file)...) }

// loadScripts loads the scripts into a server, so that each request is one command.
func loadScripts(t testing.TB, addr string) {
	t.Helper()
	files, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	for _, path := range files {
		if file := filepath.Base(path); file != "pool.lua" && file != "permits.lua" {
			harness.Load(t, addr, scriptFiles(file)...)
		}
	}
}

// taker is a semaphore of either kind and the permits that one client has acquired from it.
type taker struct {
	client     *redlatch.Client
	addr, name string
	plain      *semaphore.Semaphore
	permitSem  *semaphore.PermitSemaphore // nil for the plain kind

	mu      sync.Mutex
	number  int
	permits []*semaphore.Permit
}

func takerOf(c *redlatch.Client, s *testserver.Server, kind, name string) *taker {
	k := &taker{client: c, addr: s.Addr, name: name}
	if kind == permitKind {
		k.permitSem = c.PermitSemaphore(name)
	} else {
		k.plain = c.Semaphore(name)
	}
	return k
}

// creates makes the requests of k create the semaphore.
func (k *taker) creates(permits int) {
	if k.permitSem != nil {
		k.permitSem = k.client.PermitSemaphore(k.name, semaphore.Permits(permits))
	} else {
		k.plain = k.client.Semaphore(k.name, semaphore.Permits(permits))
	}
}

func (k *taker) delete(ctx context.Context) (bool, error) {
	if k.permitSem != nil {
		return k.permitSem.Delete(ctx)
	}
	return k.plain.Delete(ctx)
}

// set creates the semaphore.
func (k *taker) set(ctx context.Context, permits int) (bool, error) {
	if k.permitSem != nil {
		return k.permitSem.TrySetPermits(ctx, permits)
	}
	return k.plain.TrySetPermits(ctx, permits)
}

func (k *taker) add(ctx context.Context, delta int) error {
	if k.permitSem != nil {
		return k.permitSem.AddPermits(ctx, delta)
	}
	return k.plain.AddPermits(ctx, delta)
}

func (k *taker) acquire(ctx context.Context, n int, opts ...lock.Option) error {
	if k.permitSem != nil {
		return k.addPermit(k.permitSem.AcquireN(ctx, n, opts...))
	}
	return k.addNumber(n, k.plain.Acquire(ctx, n, opts...))
}

func (k *taker) try(ctx context.Context, n int) error {
	if k.permitSem != nil {
		return k.addPermit(k.permitSem.TryAcquireN(ctx, n))
	}
	return k.addNumber(n, k.plain.TryAcquire(ctx, n))
}

func (k *taker) addPermit(p *semaphore.Permit, err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		k.permits = append(k.permits, p)
	}
	return err
}

func (k *taker) addNumber(n int, err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		k.number += n
	}
	return err
}

// held returns the number of permits held, and their ids.
func (k *taker) held() (n int, ids []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.permits {
		ids = append(ids, p.IDs()...)
	}
	return k.number + len(ids), ids
}

// forget resets the permits held.
func (k *taker) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.number, k.permits = 0, nil
}

// release releases all permits in one request.
func (k *taker) release(ctx context.Context) error {
	k.mu.Lock()
	out, permits := k.number, k.permits
	k.mu.Unlock()
	k.forget()
	switch {
	case k.permitSem == nil:
		return k.plain.Release(ctx, out)
	case len(permits) == 1:
		return permits[0].Release(ctx)
	}
	var ids []string
	for _, p := range permits {
		ids = append(ids, p.IDs()...)
	}
	return k.permitSem.Release(ctx, ids...)
}

// free returns the number of free permits on the server.
func (k *taker) free(t testing.TB) int {
	t.Helper()
	reply, err := testserver.Query(k.addr, "GET", k.name)
	require.NoError(t, err)
	n, _ := strconv.Atoi(reply[0]) // "" without a semaphore
	return n
}

// requireExact fails the test unless the server has total permits, of which exactly those of
// the clients are acquired. No request may be in progress.
func requireExact(t testing.TB, total int, clients ...*taker) {
	t.Helper()
	out, ids := 0, []string{}
	for _, k := range clients {
		n, own := k.held()
		out, ids = out+n, append(ids, own...)
	}
	k := clients[0]
	require.Equal(t, total-out, k.free(t), "%s: free permits", k.name)
	if k.permitSem == nil {
		return
	}
	members, err := testserver.Query(k.addr, "ZRANGE", wire.PermitTimeouts(k.name), "0", "-1")
	require.NoError(t, err)
	taken := []string{}
	for _, m := range members {
		taken = append(taken, hex.EncodeToString([]byte(m)))
	}
	require.ElementsMatch(t, ids, taken, "%s: acquired permits", k.name)
}

// queueLength returns the number of clients in the wait queue.
func queueLength(t testing.TB, addr, name string) string {
	t.Helper()
	return harness.Do(t, addr, "ZCARD", wire.SemaphoreWaiting(name))
}

// start starts to acquire n permits.
func (k *taker) start(ctx context.Context, n int, opts ...lock.Option) <-chan error {
	done := make(chan error, 1)
	go func() { done <- k.acquire(ctx, n, opts...) }()
	return done
}

// await returns the result of start.
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

// blocked reports whether CLIENT PAUSE delays a request.
func blocked(t testing.TB, addr string) bool {
	t.Helper()
	clients, err := testserver.Query(addr, "CLIENT", "LIST")
	require.NoError(t, err)
	return strings.Contains(strings.Join(clients, ""), "flags=b")
}
