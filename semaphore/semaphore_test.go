package semaphore_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	// soon is enough for a few round trips on a busy machine.
	soon = 10 * time.Second
	// slack is how late a busy machine may be. The poll interval is twice as long, the
	// heartbeat interval shorter.
	slack = 2500 * time.Millisecond
)

// anySemaphore is the common interface of both kinds.
type anySemaphore interface {
	TrySetPermits(ctx context.Context, permits int) (bool, error)
	AddPermits(ctx context.Context, delta int) error
	SetPermits(ctx context.Context, permits int) error
	Delete(ctx context.Context) (bool, error)
	Exists(ctx context.Context) (bool, error)
	do(ctx context.Context, fn func(ctx context.Context) error) error
	Available(ctx context.Context) (int, error)
	acquire(ctx context.Context, n int, opts ...lock.WaitOption) (acquired, error)
	tryAcquire(ctx context.Context, n int) (acquired, error)
	giveBack(ctx context.Context, a acquired) error
}

// acquired is a number of acquired permits, and their ids if they have some.
type acquired struct {
	by  anySemaphore
	n   int
	ids []string

	permits []*semaphore.Permit // which would not be renewed if they were dropped
}

type plain struct{ *semaphore.Semaphore }

func (p plain) do(ctx context.Context, fn func(ctx context.Context) error) error {
	return p.Do(ctx, fn)
}

func (p plain) acquire(ctx context.Context, n int, opts ...lock.WaitOption) (acquired, error) {
	return acquired{by: p, n: n}, p.Acquire(ctx, n, opts...)
}

func (p plain) tryAcquire(ctx context.Context, n int) (acquired, error) {
	return acquired{by: p, n: n}, p.TryAcquire(ctx, n)
}

func (p plain) giveBack(ctx context.Context, a acquired) error { return p.Release(ctx, a.n) }

type permitSem struct{ *semaphore.PermitSemaphore }

func (e permitSem) do(ctx context.Context, fn func(ctx context.Context) error) error {
	return e.Do(ctx, fn)
}

func (e permitSem) acquire(ctx context.Context, n int, opts ...lock.WaitOption) (acquired, error) {
	return e.acquired(e.Acquire(ctx, n, harness.Options(opts)...))
}

func (e permitSem) tryAcquire(ctx context.Context, n int) (acquired, error) {
	return e.acquired(e.TryAcquire(ctx, n))
}

func (e permitSem) acquired(p *semaphore.Permit, err error) (acquired, error) {
	if err != nil {
		return acquired{}, err
	}
	return acquired{by: e, n: len(p.IDs()), ids: p.IDs(), permits: []*semaphore.Permit{p}}, nil
}

func (e permitSem) giveBack(ctx context.Context, a acquired) error { return e.Release(ctx, a.ids...) }

type semaphoreOf func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore

type kind struct {
	name string
	of   semaphoreOf
}

func (k kind) String() string { return k.name }

var kinds = []kind{
	{"semaphore", func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore {
		return plain{c.Semaphore(name, opts...)}
	}},
	{"permit semaphore", func(c *redlatch.Client, name string, opts ...semaphore.Option) anySemaphore {
		return permitSem{c.PermitSemaphore(name, opts...)}
	}},
}

// eachKind runs a test for both kinds on every server program, each on its own server.
func eachKind(t *testing.T, test func(t *testing.T, s *testserver.Server, of semaphoreOf)) {
	harness.EachOf(t, kinds, kind.String, func(t *testing.T, s *testserver.Server, k kind) { test(t, s, k.of) })
}

// eachVirtually is eachKind in virtual time, on an embedded server.
func eachVirtually(t *testing.T, test func(t *testing.T, s *harness.VirtualServer, of semaphoreOf)) {
	t.Helper()
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) { test(t, s, k.of) })
		})
	}
}

// files returns the files of a script.
func files(script string) []string {
	shared := []string{"pool.lua"}
	if script == "stats" || script == "permit_renew" {
		shared = nil
	} else if script == "permit_extend" || script == "permit_left" {
		shared = []string{"permits.lua"}
	} else if strings.HasPrefix(script, "permit_") {
		shared = append(shared, "permits.lua")
	}
	if strings.HasSuffix(script, "acquire") || strings.HasSuffix(script, "release") {
		shared = append([]string{"usual.lua", script + "_usual.lua"}, shared...)
	}
	return append(shared, script+".lua")
}

// scriptNames returns the names of all scripts.
func scriptNames(t testing.TB) (names []string) {
	t.Helper()
	paths, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".lua")
		if name != "pool" && name != "permits" && !strings.HasSuffix(name, "usual") && !strings.HasPrefix(name, "idle") {
			names = append(names, name)
		}
	}
	return names
}

// load loads a script into a server, so that each request is one command, and returns its SHA.
func load(t testing.TB, addr, script string) string {
	t.Helper()
	return harness.Load(t, addr, files(script)...)
}

// loadScripts loads all scripts.
func loadScripts(t testing.TB, addr string) {
	t.Helper()
	for _, name := range scriptNames(t) {
		load(t, addr, name)
	}
}

func only(_ any, err error) error { return err }

// The keys of a semaphore, and its channel.
func queueKey(name string) string     { return "redlatch_sc_waiting:{" + name + "}" }
func heartbeatKey(name string) string { return "redlatch_sc_alive:{" + name + "}" }
func timeoutsKey(name string) string  { return "{" + name + "}:timeout" }
func channel(name string) string      { return "redisson_sc:{" + name + "}" }

// withPermits creates a semaphore with this number of permits.
func withPermits[S anySemaphore](t testing.TB, s S, permits int) S {
	t.Helper()
	made, err := s.TrySetPermits(context.Background(), permits)
	require.NoError(t, err)
	require.True(t, made)
	return s
}

func mustAcquire(t testing.TB, s anySemaphore, n int, opts ...lock.WaitOption) acquired {
	t.Helper()
	permits, err := s.acquire(context.Background(), n, patient(opts)...)
	require.NoError(t, err)
	return permits
}

// patient adds a bound to options without one, so that a test cannot hang.
func patient(opts []lock.WaitOption) []lock.WaitOption {
	return append([]lock.WaitOption{lock.Wait(2 * soon)}, opts...)
}

func (a acquired) release(t testing.TB) {
	t.Helper()
	require.NoError(t, a.by.giveBack(context.Background(), a))
}

func available(t testing.TB, s interface {
	Available(context.Context) (int, error)
}) int {
	t.Helper()
	n, err := s.Available(context.Background())
	require.NoError(t, err)
	return n
}
