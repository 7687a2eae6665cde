package interop

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

var update = flag.Bool("update", false, "write the recordings to testdata/traces")

// traceName is the name of every recorded object.
const traceName = "orders"

// Recorded leases are recognizable: their rest is rounded up to tens of seconds, and no
// recording takes that long.
const (
	minute     = time.Minute
	tenMinutes = 10 * time.Minute
	moment     = 500 * time.Millisecond // of leases that expire
	while      = 4 * time.Second        // of permits for whose return somebody waits
)

// difference is a deliberate difference between redlatch and Redisson. docs/reference/compatibility.md
// explains it by name.
type difference struct {
	name string
	// where matches the lines that it explains: "kind, scenario: step: - line" if only the
	// newest Redisson has the line, with a plus if only redlatch has it.
	where *regexp.Regexp
}

// differs returns a difference from patterns of the scenario, the step and the line.
func differs(name, scenario, step, line string) difference {
	return difference{name, regexp.MustCompile(`^(?:` + scenario + `): (?:` + step + `): (?:` + line + `)$`)}
}

const (
	every = `.*`
	fairs = `(?:non-reentrant )?fair, .*`
)

// differences explain all differing lines. The first match counts.
var differences = []difference{
	differs("nothing-to-release", `(?:`+fairs+`|read, .*|write, .*)`, `.* (?:what nobody has|what is over)`,
		`- -> released|- remembers .*|- publishes .*|\+ -> not held`),
	differs("one-token", `fenced, .*`, every, `[-+] redisson_lock_token:.*`),
	differs("lost", every, `.* what is over`, `- -> not held|\+ -> lost`),
	differs("no-unlock-latch", every, every, `- remembers .*`),
	differs("hand-off", every, `.* (?:gets? .*|3 writes)`, `- publishes .*`),
	differs("lease-kept", `(?:lock|fenced|spin|fair), threads`, `1 locks again, for 1 min`, `- orders: hash, 60s|\+ orders: hash, 600s`),
	differs("lease-kept", every, `1 unlocks one of .*`, `- orders: hash, 30s|\+ orders: hash, 600s`),
	differs("lease-kept", `read, threads`, `1 gives back one of two|3 waits to write`, `- orders: hash, 30s|\+ orders: hash, 60s`),
	differs("write-lease", `write, threads`, `1 locks again, .*`, `- orders: hash, 6[39]0s|\+ orders: hash, 600s`),
	differs("write-lease", `write, .*`, `1 gives one of two read holds back`, `- orders: hash, 60s|\+ orders: hash, 600s`),
	differs("queue-expires", fairs, every, `- redisson_lock_(?:queue|timeout):.*, stays|\+ redisson_lock_(?:queue|timeout):.* (?:list|zset), expires`),
	differs("deadlines", fairs, every, `[-+] redisson_lock_timeout:.* at now \+ .*`),
	differs("signs-of-life", fairs, every, `\+ redlatch_lock_(?:alive|order):.*`),
	differs("new-head", fairs, `2 gives up`, `\+ publishes .*:<client>:3 0`),
	differs("upgrade", `read, .*`, `1 tries to write`, `- -> refused|\+ -> refused: it would wait for itself`),
	differs("waiting-writers", `read, .*`, every, `\+ redlatch_rwlock_writer:.*`),
	differs("read-holds-go", `read, threads`, `unlock of readers by force|4 .*`, `- \{orders\}:<client>:1:rwlock_timeout:1: .*`),
	differs("one-claim", `.*, (?:threads|a writer that reads)`, every, `- orders: .* = [23]|\+ orders: .* = 1|- .*:rwlock_timeout:[12]: .*|\+ .*:rwlock_timeout:1: 1, 60s`),
	differs("downgrade", `write, .*`, `1 gives the write hold back.*`, `\+ publishes .* 1`),
	differs("request-numbers", `(?:semaphore|permits), .*`, every, `\+ redlatch_sc_request:.*`),
	differs("line", `semaphore, .*`, every, `\+ redlatch_sc_(?:waiting|alive):.*`),
	differs("time-to-live", `semaphore, .*`, every, `- orders: string, stays|\+ orders: string, 60s`),
	differs("nothing-to-tell", `semaphore, .*`, every, `- publishes .* -\d`),
	differs("nothing-to-tell", `permits, .*`, `there are to be 3 .*`, `- publishes .* 3`),
	differs("renewed-permits", `permits, .*`, every, `- \{orders\}:timeout: <16 bytes> at never|\+ \{orders\}:timeout: <16 bytes> at now \+ 30s`),
	differs("told-what-is-left", `permits, .*`, `.* is taken where one .*`, `[-+] publishes .*`),
	differs("reads-write-nothing", `permits, .*`, `how many are free where one is over`, `- publishes .*|[-+] orders: \d|\+ .* is past`),
	differs("expired-permits", `permits, .*`, `what is over .*`, `- publishes .*|[-+] orders: \d|\+ .* is past`),
	differs("rounds", `latch, .*`, every, `\+ redlatch_latch_round:.*`),
	differs("messages-of-rates", `rate, .*`, every, `\+ publishes .*`),
	differs("rate-turn", `rate, .*`, `somebody waits for 5`, `\+ redlatch_rl_turn:.*`),
	differs("new-rate", `rate, .*`, `9 are set anew|1 is taken of the new rate`, `[-+] \{orders\}:.*`),
	differs("new-rate", `rate, .*`, `2 are set for an hour .*|.* (?:by|of) (?:a|this) client`, `[-+] .*`),
	differs("reads-write-nothing", `rate, .*`, `how many are free of all|how many are free where 3 are over`, `[-+] \{orders\}:.*`),
	differs("releases-of-rates", `rate, .*`, `.* (?:is|are|was) released.*`, `\+ redlatch_rl_reply:.*|[-+] \{orders\}:.*`),
	differs("zero-counts", `latch, .*`, `2 are set where a zero is stored`, `[-+] .*`),
}

// traces are the recordings of each kind.
var traces = []struct {
	kind      string
	scenarios []scenario
}{
	{"lock", []scenario{exclusive("lock"), anonymous("lock")}},
	{"non-reentrant", []scenario{exclusive("non-reentrant"), anonymous("non-reentrant")}},
	{"fenced", []scenario{exclusive("fenced"), anonymous("fenced")}},
	{"spin", []scenario{exclusive("spin"), anonymous("spin")}},
	{"fair", []scenario{exclusive("fair"), anonymous("fair")}},
	{"non-reentrant fair", []scenario{exclusive("non-reentrant fair"), anonymous("non-reentrant fair")}},
	{"read", []scenario{readers, anonymous("read")}},
	{"write", []scenario{exclusive("write"), writers, anonymous("write")}},
	{"semaphore", []scenario{counting}},
	{"permits", []scenario{expiring}},
	{"latch", []scenario{rounds}},
	{"rate", []scenario{limiting}},
}

// older introduces a version other than the newest in a trace.
var older = regexp.MustCompile(`(?m)^  Redisson .*\n(?:  [-+] .*\n)*`)

// TestTraces has each language perform the same steps and compares the results with
// testdata/traces: the behavior of Redisson, and the named differences of redlatch. A step has
// its name, the reply, messages (channel and payload), kept results of unlocks, and the keys:
// a line with type and time to live, rounded up to 10 s, and a line for each element. A
// string other than the object itself is one line.
//
// With -update the files are written anew, from redis-server.
func TestTraces(t *testing.T) {
	var occur sync.Map // the indices of differences that do
	var ran atomic.Int64
	on := func(t *testing.T, of []string, servers func(t *testing.T) []*testserver.Server) {
		for _, tr := range traces {
			t.Run(tr.kind, func(t *testing.T) {
				servers := servers(t)
				ran.Add(1)
				var text strings.Builder
				for _, sc := range tr.scenarios {
					compose(t, &text, tr.kind, sc, of, servers, &occur)
				}
				file := filepath.Join("testdata", "traces", strings.ReplaceAll(tr.kind, " ", "-")+".txt")
				if *update && len(of) == 3 {
					require.NoError(t, os.WriteFile(file, []byte(text.String()), 0o644))
				}
				want, err := os.ReadFile(file)
				require.NoError(t, err)
				if len(of) == 1 {
					want = older.ReplaceAll(want, nil)
				}
				was, is := strings.Split(string(want), "\n"), strings.Split(text.String(), "\n")
				for i := range max(len(was), len(is)) {
					if i == len(was) || i == len(is) || was[i] != is[i] {
						t.Errorf("%s differs from the recording, from line %d on:\n%s\nnow:\n%s",
							file, i+1, some(was[i:]), some(is[i:]))
						break
					}
				}
			})
		}
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		of := versions()
		if s.Valkey() {
			of = of[:1] // the files differ, but not between servers
		}
		on(t, of, func(t *testing.T) []*testserver.Server {
			t.Parallel()
			return []*testserver.Server{harness.Server(t, s.Program)}
		})
	})
	onCluster(t, func(t *testing.T, nodes []*testserver.Server) {
		on(t, []string{newest}, func(*testing.T) []*testserver.Server { return nodes })
	})
	if int(ran.Load()) < len(traces) {
		return // nothing follows from a partial run
	}
	for k, d := range differences {
		_, is := occur.Load(k)
		assert.True(t, is, "%s does not occur: nothing matches %s", d.name, d.where)
	}
}

// some returns the first lines.
func some(lines []string) string { return strings.Join(lines[:min(len(lines), 8)], "\n") }

// compose records a scenario on all sides and writes the trace of Redisson with the
// differences of the others.
func compose(t *testing.T, text *strings.Builder, kind string, sc scenario, versions []string, servers []*testserver.Server, occur *sync.Map) {
	t.Helper()
	var base []traced
	type variant struct {
		name  string
		ours  bool
		steps []traced
	}
	var others []variant
	for _, version := range versions {
		if !has(version, kind) {
			continue
		}
		p := at(t, version, servers...)
		// A separate test, which ends with its client.
		var steps []traced
		t.Run(sc.title+", Redisson "+version, func(t *testing.T) { steps = record(t, p, javaSide{p.theirs(t)}, sc) })
		if version == newest {
			base = steps
		} else {
			others = append(others, variant{"Redisson " + version, false, steps})
		}
	}
	p := at(t, newest, servers...)
	t.Run(sc.title+", redlatch", func(t *testing.T) {
		others = append(others, variant{"redlatch", true, record(t, p, goSide{p.ours(t), !sc.fresh}, sc)})
	})
	for _, o := range others {
		require.Len(t, o.steps, len(base), "%s was not recorded", o.name)
	}
	require.NotEmpty(t, base)

	fmt.Fprintf(text, "# %s: %s\n", kind, sc.title)
	for i, step := range base {
		fmt.Fprintf(text, "\n%s\n", step.what)
		for _, line := range step.lines {
			fmt.Fprintf(text, "    %s\n", line)
		}
		for _, o := range others {
			require.Equal(t, step.what, o.steps[i].what)
			lines := compare(step.lines, o.steps[i].lines)
			if len(lines) > 0 {
				fmt.Fprintf(text, "  %s\n", o.name)
			}
			for _, line := range lines {
				if !o.ours {
					fmt.Fprintf(text, "  %s\n", line)
					continue
				}
				where := kind + ", " + sc.title + ": " + step.what + ": " + line
				k := slices.IndexFunc(differences, func(d difference) bool { return d.where.MatchString(where) })
				if k < 0 {
					t.Errorf("no difference explains %q", where)
					fmt.Fprintf(text, "  %s [?]\n", line)
					continue
				}
				occur.Store(k, true)
				fmt.Fprintf(text, "  %s [%s]\n", line, differences[k].name)
			}
		}
	}
	text.WriteString("\n")
}

// compare returns the lines that only one of two has, the first's with a minus.
func compare(a, b []string) []string {
	var lines []string
	rest := slices.Clone(b)
	for _, line := range a {
		if i := slices.Index(rest, line); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			lines = append(lines, "- "+line)
		}
	}
	for _, line := range rest {
		lines = append(lines, "+ "+line)
	}
	return lines
}

var explained = regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|")

// TestDifferencesAreDocumented checks that the names of differences and the rows of the table
// in docs/reference/compatibility.md correspond.
func TestDifferencesAreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docs", "reference", "compatibility.md"))
	require.NoError(t, err)
	var there, here []string
	for _, m := range explained.FindAllSubmatch(text, -1) {
		there = append(there, string(m[1]))
	}
	for _, d := range differences {
		if !slices.Contains(here, d.name) {
			here = append(here, d.name)
		}
	}
	assert.ElementsMatch(t, here, there)
}

// The documented versions are the tested ones.
func TestVersionsAreDocumented(t *testing.T) {
	for _, file := range []string{"README.md", filepath.Join("docs", "reference", "compatibility.md")} {
		text, err := os.ReadFile(filepath.Join("..", file))
		require.NoError(t, err)
		for _, folder := range versions() {
			var version string
			shared(t, folder).give(t, command{"do": "version"}).must(t, &version)
			require.Contains(t, string(text), version, file)
		}
	}
}

// TestJavaEndsHoldsItself verifies what docs/reference/compatibility.md says about holds that Java ends
// or cuts short.
func TestJavaEndsHoldsItself(t *testing.T) {
	harness.Full(t)
	const watchdog = 1500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, version := range versions() {
			t.Run("Redisson "+version, func(t *testing.T) {
				p := at(t, version, s)
				t.Parallel()
				name := "ended in " + version
				java := javaSide{p.theirs(t, fmt.Sprintf("lockWatchdogTimeout: %d", watchdog.Milliseconds()))}

				// A MultiLock with a lease applies it to the fencing counter.
				multi := command{"client": java.c.name, "kind": "multi", "members": []any{java.c.object("fenced", "fenced "+name)}}
				var got bool
				java.c.of(t, multi, "tryLockAsync", 0, time.Minute.Milliseconds(), ms, 1).must(t, &got)
				require.True(t, got)
				require.Positive(t, harness.PTTL(t, s.Addr, "redisson_lock_token:{fenced "+name+"}"))

				// A writer that releases a read hold is no longer renewed.
				write, read := java.lock("write", name), java.lock("read", name)
				write.take(t, 1, forever, 0).gets(t, answers)
				read.take(t, 1, forever, 0).gets(t, answers)
				require.NoError(t, read.release(t, 1))
				ours := goSide{p.ours(t), false}.lock("read", name)
				ours.take(t, 1, 0, 0).fails(t, answers)
				if version != latchless {
					ours.take(t, 1, 2*watchdog, 0).gets(t, answers)
					require.ErrorIs(t, write.release(t, 1), lock.ErrNotHeld)
					require.NoError(t, ours.release(t, 1))
					return
				}
				ours.take(t, 1, 2*watchdog, 0).fails(t, answers) // that version continues to renew it
				require.NoError(t, write.release(t, 1))
			})
		}
	})
}
