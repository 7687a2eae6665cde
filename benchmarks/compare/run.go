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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redlatch/redlatch/internal/testserver"
)

// measurement is what one run of a task in some processes has come to.
type measurement struct {
	Outcomes []*outcome
	// Commands is how many the servers were sent, those of the warm-up left out.
	Commands int
	// ServerCPU is the processor time of the servers.
	ServerCPU time.Duration
}

// process is a worker (see work).
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said head
	more bool // it goes on
}

// head keeps the beginning of what is written to it: libraries log what they do not
// return, and that is of interest if a worker ends without a word.
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

// crew starts workers. Those of Redisson go on to other tasks, as a virtual machine
// needs some seconds before it is quick, unless they are spent; all others do one and
// end. The zero one is ready to use.
type crew struct{ idle []*process }

const redisson = "redisson"

// redissonDir is where what runs Redisson is built, seen from the module's directory.
var redissonDir = filepath.Join("..", "interop", "redisson", "4", "target")

// start has a worker prepare a task.
func (c *crew) start(t task) (p *process, err error) {
	if t.Peer == redisson && len(c.idle) > 0 {
		p, c.idle = c.idle[0], c.idle[1:]
	} else if p, err = launch(t.Peer); err != nil {
		return nil, err
	}
	return p, json.NewEncoder(p.in).Encode(t)
}

func launch(peer string) (*process, error) {
	p := &process{cmd: exec.Command(os.Args[0], "work")}
	if peer == redisson { // see Worker.java
		p.cmd = exec.Command("java", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off",
			"-cp", filepath.Join(redissonDir, "classes")+":"+filepath.Join(redissonDir, "lib", "*"), "interop.Worker")
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

// line reads what the worker prints next, and kills it if that takes too long.
func (p *process) line(limit time.Duration) (string, error) {
	late := time.AfterFunc(limit, func() { _ = p.cmd.Process.Kill() })
	line, err := p.out.ReadString('\n')
	line = strings.TrimSuffix(line, "\n")
	if !late.Stop() {
		return "", fmt.Errorf("nothing came of it within %v", limit)
	}
	if why, failed := strings.CutPrefix(line, failedPrefix); failed {
		return "", errors.New(why)
	}
	if err != nil {
		err = fmt.Errorf("it ended: %w: %s", err, firstLine(p.said.String()))
	}
	return line, err
}

// failedPrefix begins the line that a worker prints instead if it fails.
const failedPrefix = "failed: "

// leave ends workers, or keeps those that go on.
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

// dismiss ends the workers that are kept.
func (c *crew) dismiss() {
	c.leave(c.idle, true)
	c.idle = nil
}

// end waits until the worker has ended, or kills it if it does not.
func (p *process) end() {
	_ = p.in.Close()
	late := time.AfterFunc(5*time.Second, func() { _ = p.cmd.Process.Kill() })
	_ = p.cmd.Wait()
	late.Stop()
}

// limit is for how long a worker may take for what should take no time.
const limit = 40 * time.Second

// run has so many processes do a task at the same time.
func (c *crew) run(t task, processes int) (m *measurement, err error) {
	m = &measurement{Outcomes: make([]*outcome, processes)}
	all := make([]*process, processes)
	defer func() { c.leave(all, err != nil) }()
	for i := range all {
		one := t
		one.Process = i
		if all[i], err = c.start(one); err != nil {
			return nil, err
		}
	}
	err = together(all, func(_ int, p *process) error {
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
	err = together(all, func(i int, p *process) error {
		line, err := p.line(limit + t.For)
		if err == nil {
			err = json.Unmarshal([]byte(line), &m.Outcomes[i])
		}
		p.more = err == nil && t.Peer == redisson && !m.Outcomes[i].Spent
		return err
	})
	if err != nil {
		return nil, err
	}
	after, err := look(t)
	m.Commands, m.ServerCPU = after.commands-before.commands, after.cpu-before.cpu
	return m, err
}

func unexpected(line string) error {
	if line == "" {
		return nil
	}
	return fmt.Errorf("it says %q", line)
}

// together returns the first error, by number: the processes do the same, and mostly
// fail for the same reason.
func together(all []*process, f func(i int, p *process) error) error {
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

// sight is what servers have done so far.
type sight struct {
	commands int
	cpu      time.Duration
}

// look asks the servers that a task is done on, if they are Redis.
func look(t task) (s sight, err error) {
	if _, other := daemons[t.Peer]; other {
		return s, nil
	}
	for _, addr := range t.Addrs {
		stats, err := testserver.Info(addr, "commandstats")
		if err != nil {
			return s, err
		}
		s.commands += commands(t.Peer, stats)
		used, err := testserver.Info(addr, "cpu")
		if err != nil {
			return s, err
		}
		for _, of := range []string{"used_cpu_user", "used_cpu_sys"} {
			seconds, err := strconv.ParseFloat(used[of], 64)
			if err != nil {
				return s, err
			}
			s.cpu += time.Duration(seconds * float64(time.Second))
		}
	}
	return s, nil
}

// sent begin the names of commands that clients send and scripts do not: a server
// counts those of scripts, too.
var sent = []string{"eval", "subscribe", "unsubscribe", "ssubscribe", "sunsubscribe", "script", "ping", "wait", "client|", "hello"}

// plain are what peers send besides, which none of their scripts has. That Redisson
// sends DEL after a release cannot be told from its scripts, which do so, too.
var plain = map[string][]string{"redsync": {"set"}}

// commands returns how many commands of a peer are in the statistics of a server.
func commands(peer string, stats map[string]string) (n int) {
	for key, value := range stats {
		name := strings.TrimPrefix(key, "cmdstat_")
		counts := false
		for _, s := range sent {
			counts = counts || strings.HasPrefix(name, s)
		}
		for _, s := range plain[peer] {
			counts = counts || name == s
		}
		if calls, _, ok := strings.Cut(strings.TrimPrefix(value, "calls="), ","); ok && counts {
			c, _ := strconv.Atoi(calls)
			n += c
		}
	}
	return n
}
