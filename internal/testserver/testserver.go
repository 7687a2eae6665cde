// Package testserver runs redis-server and valkey-server for tests and
// examples, on free ports of the loopback interface, with all data in a
// temporary directory.
package testserver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Programs that can be started, in the order of preference.
const (
	Redis  = "redis-server"
	Valkey = "valkey-server"
)

// Find returns the programs that are installed here.
func Find() []string {
	var found []string
	for _, program := range []string{Redis, Valkey} {
		if _, err := exec.LookPath(program); err == nil {
			found = append(found, program)
		}
	}
	return found
}

// Server is a running server.
type Server struct {
	Program string
	Addr    string // host:port

	dir  string
	args []string

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{}
	output bytes.Buffer
}

const (
	startTimeout = 20 * time.Second
	portTries    = 5
)

// Start runs a program from Find with further arguments and blocks until it
// answers. Stop ends it.
func Start(program string, args ...string) (*Server, error) {
	dir, err := os.MkdirTemp("", "redlatch-")
	if err != nil {
		return nil, err
	}
	s := &Server{Program: program, dir: dir, args: args}
	for range portTries {
		// Somebody else may take the port before the server does.
		if s.Addr, err = freeAddr(); err != nil {
			break
		}
		if err = s.launch(); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, os.RemoveAll(dir))
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// URL returns the address as redlatch.Open takes it.
func (s *Server) URL() string { return "redis://" + s.Addr }

// Kill ends the server at once, as a crash would. What it held is lost.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Restart starts a server that was killed, on the same port and with nothing in
// it.
func (s *Server) Restart() error { return s.launch() }

// Stop ends the server and removes its files.
func (s *Server) Stop() {
	s.end(syscall.SIGKILL)
	_ = os.RemoveAll(s.dir)
}

func (s *Server) end(sig os.Signal) {
	s.mu.Lock()
	cmd, exited := s.cmd, s.exited
	s.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Signal(sig)
	<-exited
}

func (s *Server) launch() error {
	_, port, _ := net.SplitHostPort(s.Addr)
	args := append([]string{
		"--port", port, "--bind", "127.0.0.1", "--dir", s.dir,
		"--save", "", "--appendonly", "no", "--daemonize", "no",
	}, s.args...)
	cmd := exec.Command(s.Program, args...)
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
	s.cmd, s.exited = cmd, exited
	s.mu.Unlock()

	deadline := time.Now().Add(startTimeout)
	for time.Now().Before(deadline) {
		select {
		case <-exited:
			return fmt.Errorf("%s ended at once:\n%s", s.Program, s.output.String())
		case <-time.After(10 * time.Millisecond):
		}
		if reply, err := Command(s.Addr, "PING"); err == nil && reply == "+PONG" {
			return nil
		}
	}
	s.end(syscall.SIGKILL)
	return fmt.Errorf("%s does not answer", s.Program)
}

// Command sends one command on a connection of its own and returns the first
// line of the reply. It serves to set a server up and to look after it without
// the client under test.
func Command(addr string, words ...string) (string, error) {
	lines, err := command(addr, 1, words)
	return lines[0], err
}

// commandBulk is Command for a reply that is a bulk string.
func commandBulk(addr string, words ...string) (string, error) {
	lines, err := command(addr, 2, words)
	return lines[1], err
}

func command(addr string, lines int, words []string) ([]string, error) {
	reply := make([]string, lines)
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return reply, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	var req strings.Builder
	fmt.Fprintf(&req, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(&req, "$%d\r\n%s\r\n", len(w), w)
	}
	if _, err := conn.Write([]byte(req.String())); err != nil {
		return reply, err
	}
	r := bufio.NewReader(conn)
	for i := range reply {
		line, err := r.ReadString('\n')
		if err != nil {
			return reply, err
		}
		reply[i] = strings.TrimRight(line, "\r\n")
	}
	return reply, nil
}
