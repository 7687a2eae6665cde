//go:build unix

package testserver

import "syscall"

// Pause stops the server's process. Its connections stay open without traffic, as in a network
// partition, until Resume.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP, false) }

// Resume undoes Pause.
func (s *Server) Resume() { s.signal(syscall.SIGCONT, true) }
