package testserver

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// Cluster is a running cluster.
type Cluster struct {
	Primaries []*Server
}

// StartCluster runs a cluster of n primaries without replicas and blocks until
// all of them serve. Stop ends it.
func StartCluster(program string, n int) (*Cluster, error) {
	c := &Cluster{}
	for range n {
		s, err := startNode(program)
		if err != nil {
			c.Stop()
			return nil, err
		}
		c.Primaries = append(c.Primaries, s)
	}
	if err := c.join(); err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

// startNode starts a cluster node, whose bus needs a second free port.
func startNode(program string) (*Server, error) {
	bus, err := freeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(bus)
	// The timeout is generous: on a busy machine a node that is merely late would
	// be cut off, and with it the plain messages that nodes pass on to each other.
	return Start(program, "--cluster-enabled", "yes", "--cluster-port", port,
		"--cluster-node-timeout", "15000", "--cluster-announce-ip", "127.0.0.1")
}

const slotCount = 16384

func (c *Cluster) join() error {
	for i, s := range c.Primaries {
		from, to := i*slotCount/len(c.Primaries), (i+1)*slotCount/len(c.Primaries)-1
		commands := [][]string{{"CLUSTER", "ADDSLOTSRANGE", fmt.Sprint(from), fmt.Sprint(to)}}
		for _, other := range c.Primaries[:i] { // all pairs: gossip would take its time
			host, port, _ := net.SplitHostPort(other.Addr)
			commands = append(commands, []string{"CLUSTER", "MEET", host, port, argOf(other.args, "--cluster-port")})
		}
		for _, words := range commands {
			if reply, err := Command(s.Addr, words...); err != nil || reply != "+OK" {
				return fmt.Errorf("%s: %s: %w", strings.Join(words, " "), reply, err)
			}
		}
	}
	deadline := time.Now().Add(startTimeout)
	for _, s := range c.Primaries {
		for !c.serves(s) {
			if time.Now().After(deadline) {
				return fmt.Errorf("the cluster did not form within %v", startTimeout)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// serves reports whether a node sees the whole cluster: it then answers for
// keys it does not own with the address of the node that does, and is connected
// to every other, without which plain messages between them are dropped.
func (c *Cluster) serves(s *Server) bool {
	nodes, err := command(s.Addr, 1+len(c.Primaries), []string{"CLUSTER", "NODES"})
	if err != nil {
		return false
	}
	for _, node := range nodes[1:] {
		if !strings.Contains(node, " connected ") || strings.Contains(node, "handshake") {
			return false
		}
	}
	for slot := range len(c.Primaries) {
		reply, err := Command(s.Addr, "GET", keyOfSlotRange(slot, len(c.Primaries)))
		if err != nil || !strings.HasPrefix(reply, "$-1") && !strings.HasPrefix(reply, "-MOVED") {
			return false
		}
	}
	return true
}

// keyOfSlotRange returns a key whose slot lies in the i-th of n ranges.
func keyOfSlotRange(i, n int) string {
	// Their slots are 3300, 7365 and 15495.
	keys := []string{"b", "c", "a"}
	return keys[i*len(keys)/n]
}

// MoveSlotOf gives the slot of an empty key to another primary.
func (c *Cluster) MoveSlotOf(ctx context.Context, key string) error {
	slot := strconv.Itoa(wire.Slot(key))
	ids := make([]string, len(c.Primaries))
	owner := -1
	for i, s := range c.Primaries {
		var err error
		if ids[i], err = commandBulk(s.Addr, "CLUSTER", "MYID"); err != nil {
			return err
		}
		reply, err := Command(s.Addr, "GET", key)
		if err != nil {
			return err
		}
		if !strings.HasPrefix(reply, "-MOVED") {
			owner = i
		}
	}
	if owner < 0 {
		return fmt.Errorf("nobody has slot %s", slot)
	}
	to := (owner + 1) % len(c.Primaries)
	steps := []struct {
		node  int
		words []string
	}{
		{to, []string{"CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner]}},
		{owner, []string{"CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to]}},
		{to, []string{"CLUSTER", "SETSLOT", slot, "NODE", ids[to]}},
		{owner, []string{"CLUSTER", "SETSLOT", slot, "NODE", ids[to]}},
	}
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		reply, err := Command(c.Primaries[step.node].Addr, step.words...)
		if err != nil || reply != "+OK" {
			return fmt.Errorf("%s: %s: %w", strings.Join(step.words, " "), reply, err)
		}
	}
	return nil
}

func argOf(args []string, name string) string {
	for i, a := range args {
		if a == name && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

// Stop ends every node.
func (c *Cluster) Stop() {
	for _, s := range c.Primaries {
		s.Stop()
	}
}
