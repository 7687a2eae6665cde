package harness

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
)

// servers are the servers of the package under test.
var servers = pool{idle: map[string][]*testserver.Server{}}

// pool reuses servers, because starting one takes longer than most tests.
type pool struct {
	mu   sync.Mutex
	idle map[string][]*testserver.Server // by program
	all  []*testserver.Server
}

func (p *pool) take(program string) (*testserver.Server, error) {
	p.mu.Lock()
	if idle := p.idle[program]; len(idle) > 0 {
		s := idle[len(idle)-1]
		p.idle[program] = idle[:len(idle)-1]
		p.mu.Unlock()
		return s, nil
	}
	p.mu.Unlock()
	s, err := testserver.Start(program)
	if err == nil {
		p.mu.Lock()
		p.all = append(p.all, s)
		p.mu.Unlock()
	}
	return s, err
}

func (p *pool) put(s *testserver.Server) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle[s.Program] = append(p.idle[s.Program], s)
}

func (p *pool) stop() {
	for _, s := range p.all {
		s.Stop()
	}
}

// Server returns an empty server that only this test uses. Later tests reuse it, so the test must
// not change its configuration or stop it; such a test calls Own.
func Server(t testing.TB, program string) *testserver.Server {
	t.Helper()
	s, err := servers.take(program)
	require.NoError(t, err)
	t.Cleanup(func() { servers.put(s) })
	Do(t, s.Addr, "FLUSHALL")
	return s
}

// Programs returns the server programs that every test runs on: the chosen ones. A short run uses only
// the first.
func Programs(t testing.TB) []string {
	t.Helper()
	all := testserver.Chosen()
	require.NotEmpty(t, all, testserver.Missing)
	if testing.Short() {
		return all[:1]
	}
	return all
}

// Each runs a test on every server program, each on its own empty server, in parallel with other
// tests. A test that measures the process uses EachAlone.
func Each(t *testing.T, test func(t *testing.T, s *testserver.Server)) {
	t.Helper()
	inParallel(t)
	each(t, test)
}

// inParallel calls t.Parallel, which may be called only once per test.
func inParallel(t *testing.T) {
	if _, again := parallel.LoadOrStore(t, true); !again {
		t.Parallel()
		t.Cleanup(func() { parallel.Delete(t) })
	}
}

// parallel is the set of tests that have called t.Parallel.
var parallel sync.Map

// EachAlone is Each without other tests of the package in parallel, for a test that counts
// goroutines, measures memory, or changes global state.
func EachAlone(t *testing.T, test func(t *testing.T, s *testserver.Server)) {
	t.Helper()
	each(t, test)
}

func each(t *testing.T, test func(t *testing.T, s *testserver.Server)) {
	t.Helper()
	for _, program := range Programs(t) {
		t.Run(testserver.Label(program), func(t *testing.T) {
			test(t, Server(t, program))
		})
	}
}

// EachBusy is Each for a test that uses all processors. In a full run, in which it takes long, it is
// EachAlone.
func EachBusy(t *testing.T, test func(t *testing.T, s *testserver.Server)) {
	t.Helper()
	if testing.Short() {
		Each(t, test)
	} else {
		EachAlone(t, test)
	}
}

// EachOf runs a test for each row of a table on every server program, all in parallel, each on its own
// empty server.
func EachOf[R any](t *testing.T, rows []R, name func(R) string, test func(t *testing.T, s *testserver.Server, row R)) {
	t.Helper()
	t.Parallel()
	for _, program := range Programs(t) {
		for _, row := range rows {
			t.Run(testserver.Label(program)+"/"+name(row), func(t *testing.T) {
				t.Parallel()
				test(t, Server(t, program), row)
			})
		}
	}
}

// Size returns the size of a test: short in a short run, else full.
func Size(short, full int) int {
	if testing.Short() {
		return short
	}
	return full
}

// Full skips a test in a short run. A smaller test must cover the same behavior.
func Full(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("second tier: make test-all")
	}
}
