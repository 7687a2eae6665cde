package testserver

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// Cluster is a running cluster.
type Cluster struct {
	// The initial roles, which failovers change.
	Primaries []*Server
	Replicas  []*Server // the i-th replicates the i-th primary
}

// StartCluster starts a cluster of n primaries, each with a replica if replicas is set, and blocks
// until all nodes serve. A primary that is silent for nodeTimeout is replaced. Stop stops the
// cluster.
func StartCluster(program string, n int, replicas bool, nodeTimeout time.Duration) (*Cluster, error) {
	c := &Cluster{}
	start := func(nodes *[]*Server) error {
		for range n {
			s, err := startNode(program, nodeTimeout)
			if err != nil {
				return err
			}
			*nodes = append(*nodes, s)
		}
		return nil
	}
	err := start(&c.Primaries)
	if err == nil && replicas {
		err = start(&c.Replicas)
	}
	if err == nil {
		err = c.join()
	}
	if err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

func startNode(program string, timeout time.Duration) (*Server, error) {
	return start(&Server{Program: program, bus: true, args: []string{
		"--cluster-enabled", "yes",
		"--cluster-node-timeout", strconv.FormatInt(timeout.Milliseconds(), 10),
		"--cluster-announce-ip", "127.0.0.1",
		// A failure of one primary affects no other.
		"--cluster-require-full-coverage", "no", "--cluster-allow-replica-migration", "no",
		"--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
	}})
}

const slotCount = 16384

// Nodes returns all servers of the cluster.
func (c *Cluster) Nodes() []*Server { return slices.Concat(c.Primaries, c.Replicas) }

// Addrs returns the addresses of all servers.
func (c *Cluster) Addrs() []string {
	var addrs []string
	for _, s := range c.Nodes() {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

func (c *Cluster) join() error {
	nodes := c.Nodes()
	for i, s := range nodes {
		var commands [][]string
		if i < len(c.Primaries) {
			add := []string{"CLUSTER", "ADDSLOTS"}
			for slot := i * slotCount / len(c.Primaries); slot < (i+1)*slotCount/len(c.Primaries); slot++ {
				add = append(add, strconv.Itoa(slot))
			}
			// Epochs of their own, as every tool gives them: nodes with equal epochs change them until all
			// differ, and a slot that moves meanwhile can end with two nodes that redirect to each other.
			commands = append(commands, add, []string{"CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i + 1)})
		}
		for _, other := range nodes[:i] { // all pairs: gossip takes longer
			host, port, _ := net.SplitHostPort(other.Addr)
			commands = append(commands, []string{"CLUSTER", "MEET", host, port})
		}
		for _, words := range commands {
			if _, err := Query(s.Addr, words...); err != nil {
				return fmt.Errorf("%s: %w", strings.Join(words[:2], " "), err)
			}
		}
	}
	if err := eventually("the nodes meet", func() bool { return c.agree(0) }); err != nil {
		return err
	}
	for i, s := range c.Replicas {
		id, err := c.Primaries[i].id()
		if err != nil {
			return err
		}
		if _, err := Query(s.Addr, "CLUSTER", "REPLICATE", id); err != nil {
			return err
		}
	}
	if err := eventually("the cluster serves", c.Healthy); err != nil {
		return err
	}
	return c.agreeOnEpoch()
}

// Healthy reports whether every node sees all slots, and every primary has a synchronized replica
// if there are replicas.
func (c *Cluster) Healthy() bool {
	synced := 0
	for _, s := range c.Nodes() {
		if s.ReplicaOf() != "" {
			synced++
		}
		if !c.serves(s) {
			return false
		}
	}
	return synced == len(c.Replicas) && c.agree(synced)
}

func eventually(what string, cond func() bool) error {
	for deadline := time.Now().Add(startTimeout); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %s", startTimeout, what)
		}
	}
	return nil
}

// agree reports whether every node is connected to every other and knows this number of replicas, and
// whether each of these has replicated something: clients do not use others. Nodes drop pub/sub messages
// to nodes that they are not connected to.
func (c *Cluster) agree(replicas int) bool {
	nodes := c.Nodes()
	for _, s := range nodes {
		reply, err := Query(s.Addr, "CLUSTER", "NODES")
		if err != nil || strings.Contains(reply[0], "handshake") || strings.Contains(reply[0], "fail") ||
			strings.Count(reply[0], " connected") != len(nodes) || strings.Count(reply[0], "slave ") != replicas {
			return false
		}
		shards, _ := Query(s.Addr, "CLUSTER", "SHARDS") // an error before Redis 7.0, which lists all
		if slices.Contains(shards, "loading") {
			return false
		}
	}
	return true
}

// serves reports whether a node sees all slots: it redirects requests for keys of other nodes.
func (c *Cluster) serves(s *Server) bool {
	for i := range c.Primaries {
		reply, err := Command(s.Addr, "EXISTS", keyOfSlotRange(i, len(c.Primaries)))
		if err != nil || !strings.HasPrefix(reply, ":") && !strings.HasPrefix(reply, "-MOVED") {
			return false
		}
	}
	return true
}

// keyOfSlotRange returns a key whose slot is in the i-th of n ranges.
func keyOfSlotRange(i, n int) string {
	// The slots are 3300, 7365 and 15495.
	keys := []string{"b", "c", "a"}
	return keys[i*len(keys)/n]
}

// Owner returns the server that serves a key, or nil if no running server does.
func (c *Cluster) Owner(key string) *Server {
	for _, s := range c.Nodes() {
		if !s.Up() {
			continue
		}
		if reply, err := Command(s.Addr, "EXISTS", key); err == nil && strings.HasPrefix(reply, ":") {
			return s
		}
	}
	return nil
}

// Move is the migration of a slot from one primary to another.
type Move struct {
	cluster   *Cluster
	key, slot string
	from, to  *Server
}

// BeginMove starts to migrate the slot of a key to another primary: the last, unless that has it.
// Moves at the same time must have the same target: the ownership of a slot can get lost when
// the configuration epochs of two nodes change at once.
func (c *Cluster) BeginMove(key string) (*Move, error) {
	m := &Move{cluster: c, key: key, slot: strconv.Itoa(wire.Slot(key)), from: c.Owner(key)}
	if m.from == nil {
		return nil, errors.New("no node serves slot " + m.slot)
	}
	for i := range c.Primaries {
		if s := c.Owner(keyOfSlotRange(i, len(c.Primaries))); s != nil && s != m.from {
			m.to = s
		}
	}
	if m.to == nil {
		return nil, errors.New("no other primary for slot " + m.slot)
	}
	return m, errors.Join(m.set(m.to, "IMPORTING", m.from), m.set(m.from, "MIGRATING", m.to))
}

// Migrate migrates one key if it exists.
func (m *Move) Migrate(key string) error {
	host, port, _ := net.SplitHostPort(m.to.Addr)
	_, err := Query(m.from.Addr, "MIGRATE", host, port, key, "0", "5000")
	return err
}

// MigrateAll migrates the remaining keys.
func (m *Move) MigrateAll() error {
	for {
		keys, err := m.Keys()
		if err != nil || len(keys) == 0 {
			return err
		}
		for _, key := range keys {
			if err := m.Migrate(key); err != nil {
				return err
			}
		}
	}
}

// Keys returns the keys that have not been migrated.
func (m *Move) Keys() ([]string, error) {
	return Query(m.from.Addr, "CLUSTER", "GETKEYSINSLOT", m.slot, "1000")
}

// Finish assigns the slot to its new owner and blocks until every primary knows. Keys that were
// not migrated are lost.
func (m *Move) Finish() error {
	if err := m.set(m.to, "NODE", m.to); err != nil {
		return err
	}
	// The old owner refuses while it has keys. It learns of the change from the new owner and
	// drops them.
	for _, s := range m.cluster.Nodes() {
		if s.Up() && s != m.to {
			_ = m.set(s, "NODE", m.to)
		}
	}
	return eventually("slot "+m.slot+" has moved", func() bool {
		keys, err := m.Keys()
		return err == nil && len(keys) == 0 && m.known()
	})
}

// known reports whether every primary but the new owner redirects to it.
func (m *Move) known() bool {
	for _, s := range m.cluster.Nodes() {
		if !s.Up() || s == m.to || s.ReplicaOf() != "" {
			continue
		}
		reply, err := Command(s.Addr, "EXISTS", m.key)
		if err != nil || reply != "-MOVED "+m.slot+" "+m.to.Addr {
			return false
		}
	}
	return true
}

func (m *Move) set(on *Server, state string, node *Server) error {
	id, err := node.id()
	if err != nil {
		return err
	}
	_, err = Query(on.Addr, "CLUSTER", "SETSLOT", m.slot, state, id)
	return err
}

// MoveSlotOf migrates the slot of a key to another primary, with all its keys.
func (c *Cluster) MoveSlotOf(key string) error {
	m, err := c.BeginMove(key)
	if err != nil {
		return err
	}
	if err := m.MigrateAll(); err != nil {
		return err
	}
	return m.Finish()
}

// Reshard moves the first n slots of a primary to another, with the tool of the server, and blocks
// until all nodes agree.
func (c *Cluster) Reshard(from, to *Server, n int) error {
	source, err := from.id()
	if err != nil {
		return err
	}
	target, err := to.id()
	if err != nil {
		return err
	}
	tool, err := from.tool()
	if err != nil {
		return err
	}
	output, err := exec.Command(tool, "--cluster", "reshard", from.Addr, "--cluster-from", source, "--cluster-to", target,
		"--cluster-slots", strconv.Itoa(n), "--cluster-yes").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", tool, err, output[max(0, len(output)-1000):])
	}
	return c.agreeOnEpoch()
}

// MigratesSlots reports whether the nodes can move slots at once, with all their keys, as those of
// Valkey 9 can.
func (c *Cluster) MigratesSlots() bool {
	_, err := Query(c.Primaries[0].Addr, "CLUSTER", "GETSLOTMIGRATIONS")
	return err == nil
}

// MigrateSlots has a primary move the slots below n to another at once, and blocks until all nodes agree.
func (c *Cluster) MigrateSlots(from, to *Server, n int) error {
	target, err := to.id()
	if err != nil {
		return err
	}
	last := strconv.Itoa(n - 1)
	if _, err := Query(from.Addr, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", "0", last, "NODE", target); err != nil {
		return err
	}
	key := 0
	for wire.Slot(strconv.Itoa(key)) >= n {
		key++
	}
	err = eventually("slots 0 to "+last+" have moved", func() bool { return c.Owner(strconv.Itoa(key)) == to })
	if err != nil {
		return err
	}
	return c.agreeOnEpoch()
}

func (c *Cluster) agreeOnEpoch() error {
	return eventually("the nodes agree on the epoch", func() bool {
		epochs := make(map[string]bool)
		for _, s := range c.Nodes() {
			reply, err := Query(s.Addr, "CLUSTER", "INFO")
			if err != nil {
				return false
			}
			_, epoch, _ := strings.Cut(reply[0], "cluster_current_epoch:")
			epoch, _, _ = strings.Cut(epoch, "\r")
			epochs[epoch] = true
		}
		return len(epochs) == 1
	})
}

// id returns the id of a cluster node.
func (s *Server) id() (string, error) {
	reply, err := Query(s.Addr, "CLUSTER", "MYID")
	if err != nil {
		return "", err
	}
	return reply[0], nil
}

// Stop stops every node.
func (c *Cluster) Stop() {
	for _, s := range c.Nodes() {
		s.Stop()
	}
}
