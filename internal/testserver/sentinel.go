package testserver

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Sentinels is a primary with replicas, and sentinels that replace the primary after two seconds of
// silence.
type Sentinels struct {
	Servers   []*Server // the first is the initial primary
	Sentinels []*Server

	dir string
}

// StartSentinels starts a primary with replicas, and sentinels of which a majority must agree. It
// blocks until all know each other. Stop stops them.
func StartSentinels(program string, replicas, sentinels int) (*Sentinels, error) {
	s := &Sentinels{}
	if err := s.start(program, replicas, sentinels); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

func (s *Sentinels) start(program string, replicas, sentinels int) error {
	var host, port string
	for i := range 1 + replicas {
		args := []string{"--repl-diskless-sync-delay", "0"}
		if i > 0 {
			args = append(args, "--replicaof", host, port)
		}
		server, err := Start(program, args...)
		if err != nil {
			return err
		}
		s.Servers = append(s.Servers, server)
		host, port, _ = net.SplitHostPort(s.Servers[0].Addr)
	}
	var err error
	if s.dir, err = os.MkdirTemp("", "redlatch-"); err != nil {
		return err
	}
	for i := range sentinels {
		// Each sentinel stores its state in its configuration file.
		file := filepath.Join(s.dir, fmt.Sprint("sentinel-", i))
		conf := fmt.Sprintf("sentinel monitor main %s %s %d\n"+
			"sentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 5000\n", host, port, sentinels/2+1)
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return err
		}
		sentinel, err := Start(program, file, "--sentinel")
		if err != nil {
			return err
		}
		s.Sentinels = append(s.Sentinels, sentinel)
	}
	return eventually("the sentinels know all servers", s.Healthy)
}

// Healthy reports whether every sentinel knows all servers and sentinels, and every replica is
// synchronized with the primary.
func (s *Sentinels) Healthy() bool {
	primary := s.Primary()
	if primary == nil {
		return false
	}
	want := fmt.Sprintf("status=ok,address=%s,slaves=%d,sentinels=%d", primary.Addr, len(s.Servers)-1, len(s.Sentinels))
	for _, sentinel := range s.Sentinels {
		if info, err := Info(sentinel.Addr, "sentinel"); err != nil || !strings.HasSuffix(info["master0"], want) {
			return false
		}
	}
	return !slices.ContainsFunc(s.Servers, func(r *Server) bool { return r != primary && r.ReplicaOf() != primary.Addr })
}

// Primary returns the primary, or nil while the sentinels disagree.
func (s *Sentinels) Primary() *Server {
	var named string
	for _, sentinel := range s.Sentinels {
		addr, err := Query(sentinel.Addr, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
		if err != nil || len(addr) != 2 {
			return nil
		}
		if a := net.JoinHostPort(addr[0], addr[1]); named == "" || named == a {
			named = a
		} else {
			return nil
		}
	}
	i := slices.IndexFunc(s.Servers, func(server *Server) bool { return server.Addr == named })
	if i < 0 {
		return nil
	}
	return s.Servers[i]
}

// Rejoin makes a restarted server a replica of the primary, earlier than the sentinels would.
func (s *Sentinels) Rejoin(server *Server) error {
	primary := s.Primary()
	if primary == nil {
		return errors.New("the sentinels disagree about the primary")
	}
	host, port, _ := net.SplitHostPort(primary.Addr)
	_, err := Query(server.Addr, "REPLICAOF", host, port)
	return err
}

// URL returns the sentinels' addresses as a URL for redlatch.Open.
func (s *Sentinels) URL() string {
	var url strings.Builder
	url.WriteString(s.Sentinels[0].URL() + "?master_set=main")
	for _, sentinel := range s.Sentinels[1:] {
		url.WriteString("&addr=" + sentinel.Addr)
	}
	return url.String()
}

// Stop stops all servers.
func (s *Sentinels) Stop() {
	for _, server := range slices.Concat(s.Sentinels, s.Servers) {
		server.Stop()
	}
	_ = os.RemoveAll(s.dir)
}
