package hub

import (
	"context"
	"errors"
	"maps"
	"net"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

const (
	// nodeCheckInterval is how often assign checks the nodes of a cluster while no channel
	// waits for a connection.
	nodeCheckInterval = 10 * time.Second
	// refreshInterval bounds how often the nodes are asked for the slots: channels lose
	// their connection in bursts.
	refreshInterval = 100 * time.Millisecond
)

// assign assigns channels without a connection to the right one and opens it if needed.
// It is the hub's only goroutine besides one per connection.
func (h *Hub) assign() {
	timer := time.NewTimer(nodeCheckInterval)
	defer timer.Stop()

	var topo topology
	for {
		select {
		case <-h.wake:
		case <-timer.C:
		case <-h.ctx.Done():
			return
		}
		nodes := h.client.Nodes()
		h.mu.Lock()
		if h.opts.Sharded && h.stale {
			h.stale = false
			h.mu.Unlock()
			topo.refresh(h.ctx, nodes) // blocks for one round trip
			h.mu.Lock()
		}
		for addr, c := range h.conns {
			if nodes[addr] == nil {
				c.cancel() // outside the cluster it would receive nothing
			}
		}
		maps.DeleteFunc(h.retries, func(addr string, _ retry) bool { return nodes[addr] == nil })
		next := h.assignAll(&topo, nodes, time.Now())
		h.mu.Unlock()
		timer.Reset(max(time.Until(next), minBackoff))
	}
}

// assignAll assigns the channels that can be assigned now. It returns when to call it again.
func (h *Hub) assignAll(topo *topology, nodes map[string]rueidis.Client, now time.Time) (next time.Time) {
	next = now.Add(nodeCheckInterval)
	later := func(at time.Time) {
		if at.Before(next) {
			next = at
		}
	}
	for ch := range h.unassigned {
		if ch.notBefore.After(now) {
			later(ch.notBefore)
			continue
		}
		var addr string
		if h.opts.Sharded {
			addr = topo.primary(ch.name)
		} else {
			addr = h.anyAddr(nodes)
		}
		node := nodes[addr]
		if node == nil {
			h.stale = true
			later(now.Add(maxBackoff))
			continue
		}
		if at := h.retries[addr].at; at.After(now) {
			later(at)
			continue
		}
		c := h.conns[addr]
		if c == nil {
			c = newConn(h, addr)
			h.conns[addr] = c
			h.done.Go(func() { c.run(node) })
		}
		delete(h.unassigned, ch)
		ch.conn = c
		c.markChangedLocked(ch)
	}

	return next
}

// anyAddr picks the node for plain pub/sub: the connected one, else the one whose last
// failure is oldest. A plain message reaches every node of a cluster.
func (h *Hub) anyAddr(nodes map[string]rueidis.Client) string {
	for addr := range h.conns {
		if nodes[addr] != nil {
			return addr
		}
	}

	best := ""
	for addr := range nodes {
		if best == "" || h.retries[addr].at.Before(h.retries[best].at) {
			best = addr
		}
	}

	return best
}

// topology maps slots to primaries. rueidis does not expose its own map.
type topology struct {
	ranges []slotRange
	asked  time.Time
}

type slotRange struct {
	first, last int64
	primary     string
}

// refresh asks all nodes and uses the first answer: a hanging node must not delay the
// channels of the others. Without any answer it keeps the previous map. Each request
// has its own context, which the first answer does not cancel: rueidis dials a node
// with the context of the first request for it, and other requests may share that dial.
func (t *topology) refresh(ctx context.Context, nodes map[string]rueidis.Client) {
	if time.Since(t.asked) < refreshInterval {
		return
	}

	answers := make(chan []slotRange, len(nodes))
	for addr, node := range nodes {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, topologyTimeout)
			defer cancel()
			reply, _ := node.Do(wire.Shared(ctx), node.B().ClusterSlots().Build()).ToArray()
			answers <- parseSlots(reply, addr)
		}()
	}

	patience, cancel := context.WithTimeout(ctx, topologyTimeout)
	defer cancel()

	for range nodes {
		select {
		case ranges := <-answers:
			if len(ranges) > 0 {
				t.ranges = ranges
				t.asked = time.Now()
				return
			}
		case <-patience.Done():
			return
		}
	}
}

// parseSlots parses a reply to CLUSTER SLOTS from the node at asked. A node that does
// not know its own address leaves it empty.
func parseSlots(reply []rueidis.RedisMessage, asked string) []slotRange {
	var ranges []slotRange
	for _, r := range reply {
		entry, _ := r.ToArray()
		if len(entry) < 3 {
			continue
		}
		first, err1 := entry[0].AsInt64()
		last, err2 := entry[1].AsInt64()
		primary, _ := entry[2].ToArray()
		if len(primary) < 2 {
			continue
		}
		host, _ := primary[0].ToString()
		port, err3 := primary[1].AsInt64()
		if errors.Join(err1, err2, err3) != nil {
			continue
		}
		if host == "" {
			host, _, _ = net.SplitHostPort(asked)
		}
		ranges = append(ranges, slotRange{first, last, net.JoinHostPort(host, strconv.FormatInt(port, 10))})
	}

	return ranges
}

// primary returns the address of the node that owns the channel's slot, "" if unknown.
func (t *topology) primary(channel string) string {
	slot := int64(wire.Slot(channel))
	for _, r := range t.ranges {
		if r.first <= slot && slot <= r.last {
			return r.primary
		}
	}
	return ""
}
