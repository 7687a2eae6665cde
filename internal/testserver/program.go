package testserver

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// The server programs, in order of preference. A program that scripts/servers has installed also has
// the line of its version in its name, for example redis-server-8.0.
const (
	Redis  = "redis-server"
	Valkey = "valkey-server"
)

// Missing says what to do if Find returns nothing.
const Missing = "no redis-server or valkey-server: install Debian's package redis-server, or run scripts/servers redis-server-8.0"

// Find returns the installed programs or, if there are none, the newest Redis and the newest Valkey
// that scripts/servers has installed.
func Find() []string {
	var found []string
	for _, program := range []string{Redis, Valkey} {
		if _, err := exec.LookPath(program); err == nil {
			found = append(found, program)
		}
	}
	if len(found) > 0 {
		return found
	}
	for _, program := range []string{Redis, Valkey} {
		// The names of all lines so far have the same length, so the last is the newest.
		lines, _ := filepath.Glob(filepath.Join(cached(), program+"-*.*"))
		if len(lines) > 0 {
			found = append(found, filepath.Base(slices.Max(lines)))
		}
	}
	return found
}

// Chosen returns the programs that REDLATCH_SERVERS lists, separated by commas, or those that Find
// returns.
func Chosen() []string {
	if named := os.Getenv("REDLATCH_SERVERS"); named != "" {
		return strings.Split(named, ",")
	}
	return Find()
}

// Label returns a short name for a program: redis, or redis-8.0.
func Label(program string) string { return strings.Replace(program, "-server", "", 1) }

// Valkey reports whether the server is a Valkey.
func (s *Server) Valkey() bool { return strings.HasPrefix(s.Program, Valkey) }

// SupportsTLS reports whether a program was built with TLS.
func SupportsTLS(program string) bool {
	s, err := Start(program, "--tls-port", "0")
	if err == nil {
		s.Stop()
	}
	return err == nil
}

// tool returns the path of the command-line client that belongs to the server.
func (s *Server) tool() (string, error) {
	return LookPath(strings.Replace(s.Program, "-server", "-cli", 1))
}

// LookPath returns the path of an installed program, or of one that scripts/servers has installed.
func LookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err == nil {
		return path, nil
	}
	path = filepath.Join(cached(), program)
	if _, missing := os.Stat(path); missing == nil {
		return path, nil
	}
	return "", err
}

// cached returns the folder in which scripts/servers installs programs.
func cached() string {
	dir := os.Getenv("REDLATCH_SERVER_CACHE")
	if dir == "" {
		user, _ := os.UserCacheDir()
		dir = filepath.Join(user, "redlatch", "servers")
	}
	return filepath.Join(dir, "bin")
}
