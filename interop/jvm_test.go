package interop

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// The versions of Redisson, by the folder of the program for each.
const (
	newest    = "4"
	before    = "3"
	latchless = "3.23" // the newest that stores no unlock latch
)

// versions returns the versions that a run tests: the newest, and in the second tier all.
func versions() []string {
	if testing.Short() {
		return []string{newest}
	}
	return []string{newest, before, latchless}
}

// answers bounds a call that does not wait, including one that starts a client in a new
// process.
const answers = 30 * time.Second

// jvm is a process with a version of Redisson. It executes commands.
type jvm struct {
	mu    sync.Mutex
	in    io.WriteCloser
	last  int64
	calls map[int64]chan<- answer // the calls without an answer
}

// answer is the result of a command.
type answer struct {
	ID      int64           `json:"id"`
	Value   json.RawMessage `json:"value"`
	Error   string          `json:"error"`
	Message string          `json:"message"`
	at      time.Time
}

// javaError is an exception thrown by Redisson.
type javaError struct{ class, message string }

func (e *javaError) Error() string { return e.class + ": " + e.message }

// Is reports whether the exception corresponds to an error of redlatch.
func (e *javaError) Is(target error) bool {
	return e.class == "IllegalMonitorStateException" && target == lock.ErrNotHeld ||
		e.class == "CancellationException" && target == errCancelled
}

// read delivers answers until the process has ended.
func (j *jvm) read(out io.Reader) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		a := answer{at: time.Now()}
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			fmt.Fprintln(os.Stderr, "Redisson:", lines.Text())
			continue
		}
		j.mu.Lock()
		c := j.calls[a.ID]
		delete(j.calls, a.ID)
		j.mu.Unlock()
		if c != nil {
			c <- a
		}
	}
	j.mu.Lock()
	for id, c := range j.calls {
		c <- answer{Error: "process ended", at: time.Now()}
		delete(j.calls, id)
	}
	j.calls = nil
	j.mu.Unlock()
}

// call is a command that was sent.
type call struct {
	j    *jvm
	id   int64
	what string
	sent time.Time // or a moment before
	done <-chan answer
}

// command is a command for a process with Redisson: see Main.java.
type command map[string]any

// give sends a command to the process and does not wait for the answer.
func (j *jvm) give(t testing.TB, c command) *call {
	t.Helper()
	done := make(chan answer, 1)
	j.mu.Lock()
	defer j.mu.Unlock()
	require.NotNil(t, j.calls, "the process with Redisson has ended")
	j.last++
	c["id"] = j.last
	j.calls[j.last] = done
	line, err := json.Marshal(c)
	require.NoError(t, err)
	sent := time.Now()
	_, err = j.in.Write(append(line, '\n'))
	require.NoError(t, err)
	return &call{j: j, id: j.last, what: string(line), sent: sent, done: done}
}

// within waits for the answer. Its error is the exception, if any. The test fails without an
// answer within d.
func (c *call) within(t testing.TB, d time.Duration) (answer, error) {
	t.Helper()
	select {
	case a := <-c.done:
		if a.Error != "" {
			return a, &javaError{a.Error, a.Message}
		}
		return a, nil
	case <-time.After(d):
		require.FailNow(t, "no answer within "+d.String(), c.what)
		return answer{}, nil
	}
}

// must waits for the answer of a command that neither waits nor fails, and decodes it into
// value unless that is nil.
func (c *call) must(t testing.TB, value any) {
	t.Helper()
	a, err := c.within(t, answers)
	require.NoError(t, err, c.what)
	if value != nil {
		require.NoError(t, json.Unmarshal(a.Value, value), c.what)
	}
}

// cancel cancels the call's future.
func (c *call) cancel(t testing.TB) {
	t.Helper()
	c.j.give(t, command{"do": "cancel", "call": c.id}).must(t, nil)
}

var (
	jvmsMu sync.Mutex
	jvms   = map[string]*jvm{}
)

// shared returns the process with that version that all tests share.
func shared(t testing.TB, version string) *jvm {
	t.Helper()
	jvmsMu.Lock()
	defer jvmsMu.Unlock()
	if jvms[version] == nil {
		jvms[version] = launch(t, version)
	}
	return jvms[version]
}

// launch starts a process with that version.
func launch(t testing.TB, version string) *jvm {
	t.Helper()
	dir := filepath.Join("redisson", version, "target")
	require.DirExists(t, filepath.Join(dir, "lib"), "run 'mvn -f interop/redisson compile'")
	cmd := exec.Command("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
		"-cp", filepath.Join(dir, "classes")+":"+filepath.Join(dir, "lib", "*"), "interop.Main")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	j := &jvm{in: in, calls: map[int64]chan<- answer{}}
	go j.read(out)
	harness.Finally(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return j
}

// redisson is a client of Redisson.
type redisson struct {
	j    *jvm
	name string // of the client in its process
	id   string
}

// client opens a client of Redisson, which is shut down when the test ends.
func (j *jvm) client(t testing.TB, p *env, more ...string) *redisson {
	t.Helper()
	c := &redisson{j: j, name: fmt.Sprint(t.Name(), "/", time.Now().UnixNano())}
	j.give(t, command{"do": "open", "client": c.name, "config": p.config(more)}).must(t, &c.id)
	t.Cleanup(func() { j.give(t, command{"do": "close", "client": c.name}).must(t, nil) })
	return c
}

// object describes an object of a client to its process.
func (c *redisson) object(kind, name string) command {
	return command{"client": c.name, "kind": kind, "name": name}
}

// of calls a method of an object.
func (c *redisson) of(t testing.TB, object command, method string, args ...any) *call {
	t.Helper()
	if args == nil {
		args = []any{}
	}
	return c.j.give(t, command{"do": "call", "object": object, "method": method, "args": args})
}

// on calls a method of the object of that kind and name.
func (c *redisson) on(t testing.TB, kind, name, method string, args ...any) *call {
	t.Helper()
	return c.of(t, c.object(kind, name), method, args...)
}

const ms = "MILLISECONDS"

// has reports whether a version of Redisson has a kind of lock.
func has(version, kind string) bool {
	if kind == "group" {
		return version != latchless
	}
	return version == newest || !strings.HasPrefix(kind, "non-reentrant")
}
