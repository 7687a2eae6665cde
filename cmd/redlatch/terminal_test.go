package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// scripts are commands that a pane finds in its working directory.
var scripts = map[string]string{
	// It answers each line.
	"reader": `echo $$ >pid; echo ready; while read line; do echo "got <$line>"; done; echo the end`,
	// It never reads. Its file "work" grows while it runs.
	"worker": `trap 'echo got TERM >>work' TERM; echo $$ >pid; echo ready; while [ ! -e enough ]; do echo >>work; sleep 0.01; done`,
	// It works without a pause.
	"busy": `echo >work; echo $$ >pid; echo ready; while :; do echo >>work; done`,
	// It and its child handle SIGINT.
	"interruptible": `trap 'echo parent got INT; exit 5' INT; ./child; wait`,
	"child":         `trap 'echo child got INT; exit' INT; echo ready; while :; do sleep 0.01; done`,
	// They work under locks of their own.
	"loop":  `for i in 1 2 3; do redlatch lock job -- sh -c 'echo round; exec sleep 60'; done`,
	"batch": `redlatch lock job -- ./reader; read answer; echo "next <$answer>"`,
	// It shows whether it is in the foreground.
	"where": `read -r _ _ _ _ group _ _ foreground _ </proc/$$/stat; [ $group = $foreground ] && echo in front || echo behind`,
	// Its child ignores SIGTSTP.
	"stubborn": `(trap '' TSTP; echo $BASHPID >pid; exec sleep 60) & while [ ! -s pid ]; do sleep 0.01; done; echo ready; wait; exit 3`,
	// It stops instead of ending.
	"evasive": `trap 'kill -TSTP $$' TERM; echo ready; while :; do sleep 0.01; done`,
	// It asks the terminal when it may.
	"asker": `while [ ! -e ask ]; do sleep 0.01; done; echo $$ >asker.pid; read answer </dev/tty; echo "answer <$answer>"`,
}

// pane is a shell in a terminal of tmux.
type pane struct {
	t      testing.TB
	tmux   func(args ...string) (string, error)
	target string
	dir    string
	shell  string // process id
	number int    // of the next command
}

// panes returns shells in which redlatch uses a server.
func panes(t testing.TB, s *testserver.Server, n int) []*pane {
	t.Helper()
	program, err := filepath.Abs(os.Args[0])
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "redlatch") // the path of a socket is short
	require.NoError(t, err)
	require.NoError(t, os.Symlink(program, filepath.Join(dir, "redlatch")))
	for name, script := range scripts {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/bash\n"+script+"\n"), 0o755)) //nolint:gosec // to run it
	}
	env := append(os.Environ(), "TMUX_TMPDIR="+dir, "PATH="+dir+":"+os.Getenv("PATH"), asCommand+"=1", "REDLATCH_URL=", "REDIS_URL=redis://"+s.Addr,
		"HISTFILE=", `PS1=<\#:$?>`, "PROMPT_COMMAND=", "TMUX=", "GORACE=atexit_sleep_ms=0 exitcode=0 log_path="+filepath.Join(dir, "race"))
	tmux := func(args ...string) (string, error) {
		cmd := exec.Command("tmux", append([]string{"-L", "test", "-f", "/dev/null"}, args...)...)
		cmd.Env, cmd.Dir = env, dir
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	t.Cleanup(func() {
		if t.Failed() {
			screen, _ := tmux("capture-pane", "-p", "-J")
			t.Logf("the terminal shows:\n%s", strings.TrimSpace(screen))
		}
		_, _ = tmux("kill-server")
		assertNoRaces(t, dir)
		_ = os.RemoveAll(dir)
	})
	var all []*pane
	for i := range n {
		p := &pane{t: t, tmux: tmux, target: fmt.Sprintf("pane%d", i), dir: dir, number: 1}
		out, err := tmux("new-session", "-d", "-s", p.target, "-x", "150", "-y", "100", "bash", "--norc", "--noprofile", "-i")
		require.NoError(t, err, out)
		out, err = tmux("display-message", "-p", "-t", p.target, "#{pane_pid}")
		require.NoError(t, err, out)
		p.shell = strings.TrimSpace(out)
		p.prompt()
		all = append(all, p)
	}
	return all
}

// assertNoRaces fails the test if the race detector has written reports to dir. The terminal library may
// close its input while a goroutine wakes up that reads it, when the command ends.
func assertNoRaces(t testing.TB, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "race.*"))
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, report := range strings.Split(string(text), "WARNING: DATA RACE")[1:] {
			assert.Contains(t, report, "(*epollCancelReader).Close()")
		}
	}
}

// keys presses keys by their names, such as C-c.
func (p *pane) keys(names ...string) {
	p.t.Helper()
	out, err := p.tmux(append([]string{"send-keys", "-t", p.target}, names...)...)
	require.NoError(p.t, err, out)
}

// enter types a line for the command that runs.
func (p *pane) enter(line string) {
	p.t.Helper()
	out, err := p.tmux("send-keys", "-t", p.target, "-l", line)
	require.NoError(p.t, err, out)
	p.keys("Enter")
}

// run types a command for the shell.
func (p *pane) run(line string) {
	p.t.Helper()
	p.number++
	p.enter(line)
}

// logged is what a job in the background may have logged behind the prompt: a warning, on a busy machine.
const logged = `(?:time=.*\n?)*`

// foreground continues the job that has stopped. What is typed before the shell has left the terminal
// would be lost.
func (p *pane) foreground() {
	p.t.Helper()
	p.run("fg")
	p.until(regexp.MustCompile(fmt.Sprintf(`(?m)^<%d:\d+>%sfg\n.+$`, p.number-1, logged)))
	harness.Eventually(p.t, patience, "the shell has left the terminal", func() bool {
		stat, err := os.ReadFile("/proc/" + p.shell + "/stat")
		require.NoError(p.t, err)
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest) // state, parent, group, session, terminal, the terminal's foreground group
		return fields[2] != fields[5]
	})
}

// clear empties the terminal.
func (p *pane) clear() {
	p.t.Helper()
	p.run("clear")
	p.prompt()
}

// screen returns what the terminal shows.
func (p *pane) screen() string {
	p.t.Helper()
	out, err := p.tmux("capture-pane", "-p", "-J", "-t", p.target)
	require.NoError(p.t, err, out)
	return strings.TrimSpace(out)
}

// shows waits until a line of the terminal is like that.
func (p *pane) shows(line string) {
	p.t.Helper()
	p.until(regexp.MustCompile(`(?m)^` + line + ` *$`))
}

// prompt waits for the shell and returns the status of its last command.
func (p *pane) prompt() (status string) {
	p.t.Helper()
	return p.until(regexp.MustCompile(fmt.Sprintf(`(?m)^<%d:(\d+)>%s$`, p.number, logged)))[1]
}

// stop presses Ctrl-Z until the shell has stopped its job, and returns the status. The kernel discards a stop signal that
// comes while redlatch, which has just given the command the terminal, continues it.
func (p *pane) stop() (status string) {
	p.t.Helper()
	var pressed time.Time
	harness.Eventually(p.t, patience, "the job stops", func() bool {
		if time.Since(pressed) > 2*time.Second {
			p.keys("C-z")
			pressed = time.Now()
		}
		return strings.Contains(p.screen(), "Stopped")
	})
	return p.prompt()
}

func (p *pane) until(like *regexp.Regexp) (match []string) {
	p.t.Helper()
	harness.Eventually(p.t, patience, "the terminal shows "+like.String(), func() bool {
		match = like.FindStringSubmatch(p.screen())
		return match != nil
	})
	return match
}

// file returns the contents of a file of the pane.
func (p *pane) file(name string) string {
	p.t.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, name))
	require.NoError(p.t, err)
	return strings.TrimSpace(string(text))
}

// touch creates a file of the pane.
func (p *pane) touch(name string) {
	p.t.Helper()
	require.NoError(p.t, os.WriteFile(filepath.Join(p.dir, name), nil, 0o600))
}

// isStopped reports whether a process has stopped.
func isStopped(pid string) bool {
	state, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && strings.Contains(string(state), ") T ")
}

// eachPane tests with a pane for each server.
func eachPane(t *testing.T, test func(t *testing.T, s *testserver.Server, p *pane)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(t, s, panes(t, s, 1)[0]) })
}

// A process that waits for the lock stops and goes on like any other.
func TestTerminalStoppedWait(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		l := harness.Client(t, s).FairLock("job")
		h, err := l.Lock(t.Context())
		require.NoError(t, err)
		p.run("redlatch lock --kind fair job -- ./reader")
		harness.Eventually(t, patience, "redlatch waits", queued(t, l, 1))
		p.keys("C-z")
		require.Equal(t, "148", p.prompt())
		p.foreground()
		require.NoError(t, h.Unlock(t.Context()))
		p.shows("ready")
		p.enter("one")
		p.shows("got <one>")
		p.keys("C-d")
		require.Equal(t, "0", p.prompt())
	})
}

// Ctrl-C goes to the group of the command, whose status is that of redlatch.
func TestTerminalInterruptedCommand(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		p.run("set -o pipefail; redlatch lock job -- ./interruptible | (trap '' INT; cat)")
		p.shows("ready")
		p.keys("C-c")
		p.shows(".*child got INT")
		p.shows("parent got INT")
		require.Equal(t, "5", p.prompt())
		harness.NothingLeft(t, s.Addr)
	})
}

// Ctrl-C ends a loop and a script too, if it ends the command.
func TestTerminalInterruptedLoop(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		harness.Do(t, s.Addr, "SET", "import", "1")
		for loop, ready := range map[string]func(){
			"./loop": func() { p.shows("round") },
			"for i in 1 2 3; do echo round; redlatch latch wait import; done": func() {
				waitForSubscribers(t, s, "redisson_countdownlatch__channel__{import}", 1)
			},
			"for i in 1 2 3; do echo round; redlatch top; done": func() { p.shows("redlatch top .*") },
		} {
			p.clear()
			p.run(loop)
			ready()
			p.keys("C-c")
			require.Equal(t, "130", p.prompt(), loop)
			require.Len(t, regexp.MustCompile("(?m)^round$").FindAllString(p.screen(), -1), 1, loop)
		}
	})
}

// After Ctrl-Z the command stops, and after fg it has the terminal again.
func TestTerminalForeground(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		for _, row := range []string{
			"redlatch lock job -- ./reader",
			"redlatch lock job -- ./reader 2>&1 | cat", // of several processes
			"redlatch lock job -- redlatch lock other -- ./reader",
		} {
			p.clear()
			p.run(row)
			p.shows("ready")
			for _, word := range []string{"one", "two"} {
				p.enter(word)
				p.shows("got <" + word + ">")
				p.keys("C-z")
				require.Equal(t, "148", p.prompt(), row)
				require.True(t, isStopped(p.file("pid")), row)
				p.foreground()
			}
			p.keys("C-d")
			p.shows("the end")
			require.Equal(t, "0", p.prompt(), row)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// After bg the command runs, and the terminal stays with the shell.
func TestTerminalBackground(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		p.run("redlatch lock job -- ./worker")
		p.shows("ready")
		p.keys("C-z")
		require.Equal(t, "148", p.prompt())
		require.True(t, isStopped(p.file("pid")))
		p.run("bg")
		require.Equal(t, "0", p.prompt())
		harness.Eventually(t, patience, "the command runs", func() bool { return !isStopped(p.file("pid")) })
		p.touch("enough")
		harness.Eventually(t, patience, "the command ends", func() bool { return !isAlive(p.file("pid")) })
		p.run("wait; echo waited")
		p.shows("waited")
		require.Equal(t, "0", p.prompt())
		harness.NothingLeft(t, s.Addr)
	})
}

// A command in the background that reads stops until fg.
func TestTerminalBackgroundReader(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		p.run("redlatch lock job -- ./reader & wait")
		p.shows("ready")
		p.shows(`\[1\]\+ +Stopped.*`)
		p.prompt()
		p.run("bg")
		p.prompt()
		p.run("wait") // until it has stopped again
		p.prompt()
		p.foreground()
		p.enter("one")
		p.shows("got <one>")
		p.keys("C-d")
		p.shows("the end")
		require.Equal(t, "0", p.prompt())
		harness.NothingLeft(t, s.Addr)
	})
}

// Ctrl-Z and fg of a script stop and continue the script and the command.
func TestTerminalScript(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		p.run("./batch")
		p.shows("ready")
		require.Equal(t, "148", p.stop())
		p.foreground()
		p.enter("one")
		p.shows("got <one>")
		p.keys("C-d")
		p.shows("the end")
		p.enter("two")
		p.shows("next <two>")
		require.Equal(t, "0", p.prompt())
	})
}

// A command that is a job of its own is in the foreground at once, whether it reads the terminal or not.
func TestTerminalOfOneProcess(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		for _, row := range []struct{ where, line string }{
			{"in front", "redlatch lock job -- ./where"},
			{"in front", "redlatch lock job -- ./where </dev/null >out; cat out"},
			{"behind", "redlatch lock job -- ./where | cat"},
			{"behind", "true | redlatch lock job -- ./where"},
			{"behind", "redlatch lock job -- ./where 2> >(cat)"},
			{"behind", "sh -c 'redlatch lock job -- ./where; true'"},
			{"behind", "redlatch lock job -- ./where & wait"},
		} {
			p.clear()
			p.run(row.line)
			p.shows(row.where)
			require.Equal(t, "0", p.prompt(), row.line)
		}
	})
}

// The shell gets the terminal back from a command that is killed, because it ignores that it is to end, or stops
// then. redlatch does not stop.
func TestTerminalLostLock(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		for _, command := range []string{"redlatch lock --ttl 3s job -- ./evasive", "trap '' TERM; redlatch lock --ttl 3s job -- ./reader"} {
			p.clear()
			p.run(command)
			p.shows("ready")
			harness.Do(t, s.Addr, "DEL", "job")
			require.Equal(t, "123", p.prompt(), command)
			p.run("echo $((1 + 1)) left")
			p.shows("2 left")
			p.prompt()
		}
	})
}

// A command that may not write in the background gets the terminal.
func TestTerminalWriter(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		p.run("stty tostop; sh -c 'redlatch lock job -- echo written; true'")
		p.shows("written")
		require.Equal(t, "0", p.prompt())
	})
}

// Another process of the job may ask the terminal in the background, which stops it, but not redlatch.
// Ctrl-Z stops the job as a whole, although its command is in the background.
func TestTerminalBackgroundPager(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		p.run("redlatch lock --ttl 9s job -- ./worker | ./asker &")
		p.prompt()
		awaitRenewal(t, s)
		p.touch("ask")
		harness.Eventually(t, patience, "the asker has stopped", func() bool {
			pid, err := os.ReadFile(filepath.Join(p.dir, "asker.pid"))
			return err == nil && isStopped(strings.TrimSpace(string(pid)))
		})
		awaitRenewal(t, s)
		p.foreground() // the shell continues a job if all of it has stopped
		p.keys("C-z")
		p.prompt()
		require.True(t, isStopped(p.file("pid")))
		p.foreground()
		harness.Eventually(t, patience, "the command runs", func() bool { return !isStopped(p.file("pid")) })
		p.enter("yes")
		p.shows("answer <yes>")
		p.touch("enough")
		require.Equal(t, "0", p.prompt())
		harness.NothingLeft(t, s.Addr)
	})
}

// A job that is stopped for longer than the lease ends when it continues, without another step of
// the command. Others can have the lock meanwhile.
func TestTerminalStoppedTooLong(t *testing.T) {
	eachPane(t, func(t *testing.T, s *testserver.Server, p *pane) {
		p.run("redlatch lock --ttl 3s job -- ./busy")
		p.shows("ready")
		p.keys("C-z")
		require.Equal(t, "148", p.prompt())
		work := p.file("work")
		harness.Eventually(t, patience, "the lease is over", func() bool { return harness.PTTL(t, s.Addr, "job") == -2 })
		require.Zero(t, exitStatus(t, s, sh("true", "--try")...))
		p.run("fg")
		require.Equal(t, "123", p.prompt())
		require.False(t, isAlive(p.file("pid")))
		require.Equal(t, work, p.file("work"))
	})
}

// Ctrl-Z stops even what ignores it: nothing may go on without renewals.
func TestTerminalStubbornChild(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		p.run("redlatch lock job -- ./stubborn")
		p.shows("ready")
		p.keys("C-z")
		require.Equal(t, "148", p.prompt())
		pid := p.file("pid")
		harness.Eventually(t, patience, "the child has stopped", func() bool { return isStopped(pid) })
		p.foreground()
		harness.Eventually(t, patience, "the child goes on", func() bool { return !isStopped(pid) })
		kill(t, pid)
		require.Equal(t, "3", p.prompt())
	})
}

// No shell could continue redlatch, so Ctrl-Z has no effect.
func TestTerminalWithoutShell(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		p.run("exec redlatch lock job -- ./reader")
		p.shows("ready")
		p.keys("C-z")
		p.shows(`\^Z`)
		p.enter("one")
		p.shows(".*got <one>")
	})
}

// A command that cannot be run has not kept the terminal.
func TestTerminalNotRunnable(t *testing.T) {
	eachPane(t, func(t *testing.T, _ *testserver.Server, p *pane) {
		p.run("stty tostop; chmod -x reader")
		p.prompt()
		p.run("redlatch lock job -- ./reader")
		require.Equal(t, "126", p.prompt())
	})
}
