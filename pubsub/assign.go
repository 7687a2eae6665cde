package pubsub

import (
	"context"
	"time"

	"github.com/redis/rueidis"
)

// nodeCheckInterval is how often assign checks the nodes of a cluster while no channel
// waits for a connection.
const nodeCheckInterval = 10 * time.Second

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
		next := time.Now().Add(nodeCheckInterval)
		nodes := h.client.Nodes()
		h.mu.Lock()
		if h.opts.Sharded && h.stale {
			h.stale = false
			h.mu.Unlock()
			topo.refresh(h.ctx, nodes) // blocks for one round trip
			h.mu.Lock()
		}
		for addr, c := range h.conns {
			if _, known := nodes[addr]; !known {
				c.cancel() // outside the cluster it would receive nothing
			}
		}
		for addr := range h.retries {
			if _, known := nodes[addr]; !known {
				delete(h.retries, addr)
			}
		}
		if at := h.assignAll(&topo, nodes, time.Now()); !at.IsZero() && at.Before(next) {
			next = at
		}
		h.mu.Unlock()
		timer.Reset(max(time.Until(next), minBackoff))
	}
}

// assignAll assigns the channels that can be assigned now. It returns when to try the
// others, zero if none remains.
func (h *Hub) assignAll(topo *topology, nodes map[string]rueidis.Client, now time.Time) (next time.Time) {
	later := func(at time.Time) {
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	for ch := range h.unassigned {
		if ch.notBefore.After(now) {
			later(ch.notBefore)
			continue
		}
		addr := h.anyAddr(nodes)
		if h.opts.Sharded {
			addr = topo.primary(ch.name)
		}
		node, known := nodes[addr]
		if !known {
			h.stale = true
			later(now.Add(maxBackoff))
			continue
		}
		if r, ok := h.retries[addr]; ok && r.at.After(now) {
			later(r.at)
			continue
		}
		c := h.conns[addr]
		if c == nil {
			c = &conn{
				hub: h, addr: addr, wake: make(chan struct{}, 1),
				channels: make(map[*channel]struct{}), changed: make(map[*channel]struct{}),
			}
			c.ctx, c.cancel = context.WithCancel(h.ctx)
			h.conns[addr] = c
			h.done.Go(func() { c.run(node) })
		}
		delete(h.unassigned, ch)
		ch.conn = c
		c.channels[ch] = struct{}{}
		c.markChanged(ch)
	}
	return next
}

// anyAddr picks the node for plain pub/sub: the connected one, else the one whose last
// failure is oldest. A plain message reaches every node of a cluster.
func (h *Hub) anyAddr(nodes map[string]rueidis.Client) string {
	if h.opts.Sharded {
		return ""
	}
	for addr := range h.conns {
		if _, known := nodes[addr]; known {
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
