// Package testserver runs redis-server and valkey-server for tests and examples, on free ports
// of the loopback interface, with a temporary data directory.
package testserver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Server is a running server.
type Server struct {
	Program string
	Addr    string // host:port

	dir  string
	args []string
	bus  bool // whether it listens on a second port, for the bus of a cluster

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{}
	up     bool
	output bytes.Buffer
}

const (
	startTimeout = 20 * time.Second
	portTries    = 5
)

// Start starts a program with these additional arguments and blocks until it answers. Stop stops
// it.
func Start(program string, args ...string) (*Server, error) {
	return start(&Server{Program: program, args: args})
}

func start(s *Server) (_ *Server, err error) {
	if s.dir, err = os.MkdirTemp("", "redlatch-"); err != nil {
		return nil, err
	}
	for range portTries {
		// Another process may take the port before the server does.
		if s.Addr, err = freeAddr(s.bus); err != nil {
			break
		}
		if err = s.launch(); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(s.dir))
}

// busOffset is the distance of the port of the cluster bus, which older servers cannot change.
const busOffset = 10_000

// freeAddr returns an address whose port is free, as is the port of the bus if bus is set.
func freeAddr(bus bool) (string, error) {
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", err
		}
		defer l.Close() // at the end, so that each try gets another port
		if !bus {
			return l.Addr().String(), nil
		}
		second, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port+busOffset))
		if err == nil {
			return l.Addr().String(), second.Close()
		}
	}
}

// URL returns the address as a URL for redlatch.Open.
func (s *Server) URL() string { return "redis://" + s.Addr }

// Kill kills the server like a crash. Its data is lost.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Restart restarts a killed server on the same port, with the data of the last SAVE. It answers
// LOADING while it loads the data.
func (s *Server) Restart() error { return s.launch() }

// Up reports whether the server is neither killed nor paused.
func (s *Server) Up() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

// ReplicaOf returns the address of the primary that the server is synchronized with, "" if there
// is none.
func (s *Server) ReplicaOf() string {
	info, err := Info(s.Addr, "replication")
	if err != nil || info["master_link_status"] != "up" {
		return ""
	}
	return net.JoinHostPort(info["master_host"], info["master_port"])
}

// CutReplicas stops the replication from this server until Restart.
func (s *Server) CutReplicas() error {
	for _, words := range [][]string{
		{"ACL", "SETUSER", "default", "-psync", "-sync"},
		{"CLIENT", "KILL", "TYPE", "replica"},
	} {
		if _, err := Query(s.Addr, words...); err != nil {
			return fmt.Errorf("%s: %w", strings.Join(words, " "), err)
		}
	}
	return nil
}

// Stop stops the server and removes its files.
func (s *Server) Stop() {
	s.end(syscall.SIGKILL)
	_ = os.RemoveAll(s.dir)
}

func (s *Server) end(sig os.Signal) {
	if exited := s.signal(sig, false); exited != nil {
		<-exited
	}
}

// signal sends a signal, after which the process is up or not. It returns a channel that is
// closed when the process exits, nil if it was never started.
func (s *Server) signal(sig os.Signal, up bool) (exited <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return nil
	}
	_ = s.cmd.Process.Signal(sig)
	s.up = up
	return s.exited
}

func (s *Server) launch() error {
	_, port, _ := net.SplitHostPort(s.Addr)
	// A configuration file must be the first argument.
	args := slices.Concat(s.args, []string{
		"--port", port, "--bind", "127.0.0.1", "--dir", s.dir,
		"--save", "", "--appendonly", "no", "--daemonize", "no",
	})
	path, err := LookPath(s.Program)
	if err != nil {
		return err
	}
	cmd := exec.Command(path, args...)
	s.output.Reset()
	cmd.Stdout, cmd.Stderr = &s.output, &s.output
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	s.mu.Lock()
	s.cmd, s.exited, s.up = cmd, exited, true
	s.mu.Unlock()

	deadline := time.Now().Add(startTimeout)
	for time.Now().Before(deadline) {
		select {
		case <-exited:
			return fmt.Errorf("%s exited at once:\n%s", s.Program, s.output.String())
		case <-time.After(10 * time.Millisecond):
		}
		// Another server may have taken the port meanwhile.
		if info, err := Info(s.Addr, "server"); err == nil && info["process_id"] == strconv.Itoa(cmd.Process.Pid) {
			return nil
		}
	}
	s.end(syscall.SIGKILL)
	return fmt.Errorf("%s does not answer", s.Program)
}

// Command sends one command on a new connection and returns the first line of the reply. Tests
// use it to configure and inspect a server without the client under test.
func Command(addr string, words ...string) (reply string, err error) {
	err = command(addr, words, func(r *bufio.Reader) error {
		reply, err = readLine(r)
		return err
	})
	return reply, err
}

// Query sends one command and returns all strings of the reply, which may be a nested array. An
// error reply is returned as an error.
func Query(addr string, words ...string) (reply []string, err error) {
	err = command(addr, words, func(r *bufio.Reader) error { return readReply(r, &reply) })
	return reply, err
}

// Info returns the fields of a section of INFO.
func Info(addr, section string) (map[string]string, error) {
	reply, err := Query(addr, "INFO", section)
	if err != nil {
		return nil, err
	}
	fields := make(map[string]string)
	for line := range strings.Lines(reply[0]) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

func command(addr string, words []string, read func(r *bufio.Reader) error) error {
	conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	var req strings.Builder
	fmt.Fprintf(&req, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(&req, "$%d\r\n%s\r\n", len(w), w)
	}
	if _, err := conn.Write([]byte(req.String())); err != nil {
		return err
	}
	return read(bufio.NewReader(conn))
}

func readLine(r *bufio.Reader) (string, error) {
	line, err := r.ReadString('\n')
	return strings.TrimRight(line, "\r\n"), err
}

func readReply(r *bufio.Reader, reply *[]string) error {
	line, err := readLine(r)
	if err != nil || line == "" {
		return errors.Join(err, io.ErrUnexpectedEOF)
	}
	n, _ := strconv.Atoi(line[1:])
	switch line[0] {
	case '-':
		return errors.New(line[1:])
	case '*':
		for range n {
			if err := readReply(r, reply); err != nil {
				return err
			}
		}
	case '$':
		text := make([]byte, max(n, 0)+len("\r\n"))
		if n >= 0 {
			if _, err := io.ReadFull(r, text); err != nil {
				return err
			}
		}
		*reply = append(*reply, string(text[:max(n, 0)]))
	default:
		*reply = append(*reply, line[1:])
	}
	return nil
}
