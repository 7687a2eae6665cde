package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// measurement is the result of one run of a task in some processes.
type measurement struct {
	Outcomes []*outcome
	// Commands is the number of commands sent to the servers, without the warm-up.
	Commands int
	// ServerCPU is the processor time of the servers, and Scripts the part that they spent on
	// scripts, without their input and output.
	ServerCPU time.Duration
	Scripts   time.Duration
}

// process is a worker (see work).
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said head
	peer string
	more bool // it accepts further tasks
}

// head keeps the beginning of its input: libraries log errors that they do not return, which
// may explain why a worker ended.
type head struct {
	mu   sync.Mutex
	text []byte
}

func (h *head) Write(text []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	const enough = 4 << 10
	h.text = append(h.text, text[:min(len(text), enough-len(h.text))]...)
	return len(text), nil
}

func (h *head) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return string(h.text)
}

// crew starts workers. Those in Java accept further tasks unless they are spent, because a
// virtual machine needs some seconds to warm up; all others do one task and end. The zero
// value is ready to use.
type crew struct{ idle []*process }

// The peers in Java.
const (
	redisson = "redisson"
	curator  = "curator"
)

// java has the program of each peer in Java: its class, and its folder below interop.
var java = map[string]struct{ class, folder string }{
	redisson: {"RedissonWorker", "redisson/4"},
	curator:  {"CuratorWorker", "curator"},
}

// jars returns the path of libraries of a peer in Java, relative to the module.
func jars(peer, pattern string) string { return filepath.Join(built(peer), "lib", pattern) }

func built(peer string) string { return filepath.Join("..", "interop", java[peer].folder, "target") }

// start has a worker prepare a task.
func (c *crew) start(t task) (p *process, err error) {
	if i := slices.IndexFunc(c.idle, func(p *process) bool { return p.peer == t.Peer }); i >= 0 {
		p = c.idle[i]
		c.idle = slices.Delete(c.idle, i, i+1)
	} else if p, err = launch(t.Peer); err != nil {
		return nil, err
	}
	return p, json.NewEncoder(p.in).Encode(t)
}

func launch(peer string) (*process, error) {
	p := &process{cmd: exec.Command(os.Args[0], "work"), peer: peer}
	if of, ok := java[peer]; ok { // see Worker.java
		classes := filepath.Join(built(peer), "classes")
		if _, err := os.Stat(classes); err != nil {
			return nil, fmt.Errorf("%w: mvn -f interop/%s compile builds it", errMissing, of.folder)
		}
		p.cmd = exec.Command("java", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off",
			"-cp", classes+":"+jars(peer, "*"), "interop."+of.class)
	}
	p.cmd.Stderr = &p.said
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.in, p.out = in, bufio.NewReader(out)
	return p, p.cmd.Start()
}

// line reads the next line of the worker, and kills it if that takes too long.
func (p *process) line(limit time.Duration) (string, error) {
	late := time.AfterFunc(limit, func() { _ = p.cmd.Process.Kill() })
	line, err := p.out.ReadString('\n')
	line = strings.TrimSuffix(line, "\n")
	if !late.Stop() {
		return "", fmt.Errorf("no output within %v", limit)
	}
	if why, failed := strings.CutPrefix(line, failedPrefix); failed {
		return "", errors.New(why)
	}
	if err != nil {
		err = fmt.Errorf("it ended: %w: %s", err, firstLine(p.said.String()))
	}
	return line, err
}

// failedPrefix begins the line that a failing worker prints.
const failedPrefix = "failed: "

// leave ends workers, or keeps those that accept further tasks.
func (c *crew) leave(all []*process, failed bool) {
	for _, p := range all {
		switch {
		case p == nil:
		case p.more && !failed:
			c.idle = append(c.idle, p)
		default:
			p.end()
		}
	}
}

// keep ends the idle workers of all peers for which ask returns false.
func (c *crew) keep(ask func(peer string) bool) {
	all := c.idle
	c.idle = nil
	for _, p := range all {
		c.leave([]*process{p}, !ask(p.peer))
	}
}

// end waits until the worker has ended, and kills it if that takes too long.
func (p *process) end() {
	_ = p.in.Close()
	late := time.AfterFunc(5*time.Second, func() { _ = p.cmd.Process.Kill() })
	_ = p.cmd.Wait()
	late.Stop()
}

// limit bounds steps of a worker that should take no time.
const limit = 40 * time.Second

// run runs a task in several processes at the same time. The second half of them gets the task of a rival. It looks at the
// servers before and after.
func (c *crew) run(t, rival task, processes int, look func(t task) (snapshot, error)) (m *measurement, err error) {
	m = &measurement{Outcomes: make([]*outcome, processes)}
	all := make([]*process, processes)
	defer func() { c.leave(all, err != nil) }()
	for i := range all {
		one := t
		if i >= firstRival(processes) {
			one = rival
		}
		one.Process = i
		if all[i], err = c.start(one); err != nil {
			return nil, err
		}
	}
	err = inParallel(all, func(_ int, p *process) error {
		if line, err := p.line(limit + t.Patience); err != nil || line != "ready" {
			return fmt.Errorf("it is not ready: %w", errors.Join(err, unexpected(line)))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	before, err := look(t)
	if err != nil {
		return nil, err
	}
	for i := range all {
		if _, err := io.WriteString(all[i].in, "begin\n"); err != nil {
			return nil, err
		}
	}
	err = inParallel(all, func(i int, p *process) error {
		line, err := p.line(limit + t.For)
		if err == nil {
			err = json.Unmarshal([]byte(line), &m.Outcomes[i])
		}
		p.more = err == nil && java[p.peer].class != "" && !m.Outcomes[i].Spent
		return err
	})
	if err != nil {
		return nil, err
	}
	after, err := look(t)
	m.Commands, m.ServerCPU, m.Scripts = after.commands-before.commands, after.cpu-before.cpu, after.scripts-before.scripts
	return m, err
}

func unexpected(line string) error {
	if line == "" {
		return nil
	}
	return fmt.Errorf("unexpected output %q", line)
}

// inParallel runs f for all processes and returns the first error by number: the processes do
// the same work and usually fail for the same reason.
func inParallel(all []*process, f func(i int, p *process) error) error {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, p := range all {
		wg.Go(func() { errs[i] = f(i, p) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
