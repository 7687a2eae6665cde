package pubsub

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/rueidis"
)

// feed is one subscriber connection and the channels on it. It lives as long
// as its connection; a lost one is replaced by a new feed. Its fields belong to
// the hub's mutex.
type feed struct {
	hub      *Hub
	addr     string
	ctx      context.Context // ends with the hub, or when the node is gone
	cancel   context.CancelFunc
	channels map[*channel]struct{}
	changed  map[*channel]struct{} // to subscribe or to unsubscribe
	kick     chan struct{}
	up       bool
}

// lookAround is how often the nodes of a cluster are looked at while nothing
// has to be placed.
const lookAround = 10 * time.Second

// place puts channels that are on no connection onto the right one, and opens
// it where needed. It is the hub's only goroutine besides one per connection.
func (h *Hub) place() {
	timer := time.NewTimer(lookAround)
	defer timer.Stop()
	var topo topology
	for {
		select {
		case <-h.kick:
		case <-timer.C:
		case <-h.ctx.Done():
			return
		}
		next := time.Now().Add(lookAround)
		nodes := h.client.Nodes()
		h.mu.Lock()
		if h.opts.Sharded && h.stale {
			h.stale = false
			h.mu.Unlock()
			topo.refresh(h.ctx, nodes) // blocks for a round trip
			h.mu.Lock()
		}
		for addr, f := range h.feeds {
			if _, known := nodes[addr]; !known {
				f.cancel() // it may live on, outside the cluster, and hear nothing
			}
		}
		for addr := range h.retries {
			if _, known := nodes[addr]; !known {
				delete(h.retries, addr)
			}
		}
		if at := h.placeAll(&topo, nodes, time.Now()); !at.IsZero() && at.Before(next) {
			next = at
		}
		h.mu.Unlock()
		timer.Reset(max(time.Until(next), minBackoff))
	}
}

// placeAll places what can be placed now and returns when to try the rest.
func (h *Hub) placeAll(topo *topology, nodes map[string]rueidis.Client, now time.Time) (next time.Time) {
	later := func(at time.Time) {
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	for ch := range h.homeless {
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
		f := h.feeds[addr]
		if f == nil {
			f = &feed{
				hub: h, addr: addr, kick: make(chan struct{}, 1),
				channels: make(map[*channel]struct{}), changed: make(map[*channel]struct{}),
			}
			f.ctx, f.cancel = context.WithCancel(h.ctx)
			h.feeds[addr] = f
			h.done.Go(func() { f.run(node) })
		}
		delete(h.homeless, ch)
		ch.feed = f
		f.channels[ch] = struct{}{}
		f.change(ch)
	}
	return next
}

// anyAddr picks the node for plain pub/sub: the one that is connected, or any
// that has not just failed. In a cluster a plain message reaches every node.
func (h *Hub) anyAddr(nodes map[string]rueidis.Client) string {
	if h.opts.Sharded {
		return ""
	}
	for addr := range h.feeds {
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

// change tells the feed to bring ch in line with whether it is wanted. The
// hub's mutex is held.
func (f *feed) change(ch *channel) {
	f.changed[ch] = struct{}{}
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

// run serves one connection until it breaks, its node is gone, or the hub is
// closed.
func (f *feed) run(node rueidis.Client) {
	defer f.cancel()
	err := f.connect(node)

	h := f.hub
	h.mu.Lock()
	delete(h.feeds, f.addr)
	for ch := range f.channels {
		f.evict(ch)
	}
	h.wakePlacer()
	if f.ctx.Err() != nil { // no fault of the connection
		h.mu.Unlock()
		return
	}
	r := h.retries[f.addr]
	r.failures++
	delay := min(minBackoff<<min(r.failures-1, 10), maxBackoff)
	r.at = time.Now().Add(delay/2 + rand.N(delay/2))
	h.retries[f.addr] = r
	h.mu.Unlock()
	if r.failures == 1 {
		h.log.Warn("redlatch: subscriber connection lost, waiters poll until it is back", "addr", f.addr, "error", err)
	}
}

// connect takes a connection for the feed alone and serves it.
func (f *feed) connect(node rueidis.Client) error {
	// Dedicate knows no context, and waits for as long as the pool is exhausted.
	dedicated := make(chan rueidis.DedicatedClient, 1)
	go func() {
		conn, _ := node.Dedicate()
		dedicated <- conn
	}()
	var conn rueidis.DedicatedClient
	select {
	case conn = <-dedicated:
	case <-f.ctx.Done():
		go func() { (<-dedicated).Close() }()
		return f.ctx.Err()
	}
	// Close, not the release function: a connection with subscriptions must not
	// go back to the pool.
	defer conn.Close()
	broken := conn.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage:      func(m rueidis.PubSubMessage) { f.deliver(m.Channel, m.Message) },
		OnSubscription: f.confirmed,
	})
	return f.serve(conn, broken)
}

// evict takes a channel off the feed; it needs another place if somebody
// listens. The hub's mutex is held.
func (f *feed) evict(ch *channel) {
	h := f.hub
	delete(f.channels, ch)
	delete(f.changed, ch)
	ch.feed, ch.state, ch.syncing = nil, off, false
	if len(ch.listeners) == 0 {
		delete(h.channels, ch.name)
		return
	}
	h.homeless[ch] = struct{}{}
	h.stale = true
}

func (f *feed) serve(conn rueidis.DedicatedClient, broken <-chan error) error {
	for {
		select {
		case err := <-broken:
			if err == nil {
				err = errors.New("connection closed")
			}
			return err
		case <-f.ctx.Done():
			return f.ctx.Err()
		case <-f.kick:
		}
		subscribe, unsubscribe := f.takeChanges()
		if err := f.unsubscribe(conn, unsubscribe); err != nil {
			return err
		}
		if err := f.subscribe(conn, subscribe); err != nil {
			return err
		}
	}
}

func (f *feed) takeChanges() (subscribe, unsubscribe []*channel) {
	f.hub.mu.Lock()
	defer f.hub.mu.Unlock()
	for ch := range f.changed {
		delete(f.changed, ch)
		wanted := len(ch.listeners) > 0
		switch {
		case ch.state == off && wanted:
			ch.state = asked
			subscribe = append(subscribe, ch)
		case ch.state == off:
			f.evict(ch)
		case ch.state == on && !wanted:
			ch.state = leaving
			unsubscribe = append(unsubscribe, ch)
		case ch.state == asked && !wanted:
			// Looked at again when the confirmation comes.
		case ch.state == on && !ch.syncing && ch.takeSyncs():
			subscribe = append(subscribe, ch)
		}
	}
	return subscribe, unsubscribe
}

// takeSyncs reports whether a listener has called Sync since the last time. The
// channel is subscribed once more then: the confirmation stands in line with the
// messages. The hub's mutex is held.
func (ch *channel) takeSyncs() bool {
	for _, s := range ch.listeners {
		if s.sync == syncDue {
			s.sync, ch.syncing = syncSent, true
		}
	}
	return ch.syncing
}

// synced returns the listeners whose Sync is answered. One who has called it again
// since gets the next answer. The hub's mutex is held.
func (ch *channel) synced(f *feed) (subs []*Subscription) {
	ch.syncing = false
	for _, s := range ch.listeners {
		switch s.sync {
		case syncSent:
			s.sync = synced
			subs = append(subs, s)
		case syncDue:
			f.change(ch)
		}
	}
	return subs
}

// chunk is how many channels travel in one pipeline at most.
const chunk = 256

// subscribe sends one command per channel: in a cluster channels of different
// slots cannot share one, and a refusal then concerns one channel alone. The
// confirmation arrives at confirmed.
func (f *feed) subscribe(conn rueidis.DedicatedClient, chs []*channel) error {
	return f.send(chs, func(ctx context.Context, part []*channel) error {
		cmds := make(rueidis.Commands, len(part))
		for i, ch := range part {
			if f.hub.opts.Sharded {
				cmds[i] = conn.B().Ssubscribe().Channel(ch.name).Build()
			} else {
				cmds[i] = conn.B().Subscribe().Channel(ch.name).Build()
			}
		}
		for i, resp := range conn.DoMulti(ctx, cmds...) {
			err := resp.Error()
			if err == nil {
				continue
			}
			refusal, isReply := rueidis.IsRedisErr(err)
			if !isReply {
				return err
			}
			f.refused(part[i], refusal)
		}
		return nil
	})
}

func (f *feed) unsubscribe(conn rueidis.DedicatedClient, chs []*channel) error {
	return f.send(chs, func(ctx context.Context, part []*channel) error {
		cmds := make(rueidis.Commands, len(part))
		for i, ch := range part {
			if f.hub.opts.Sharded {
				cmds[i] = conn.B().Sunsubscribe().Channel(ch.name).Build()
			} else {
				cmds[i] = conn.B().Unsubscribe().Channel(ch.name).Build()
			}
		}
		if err := notBusy(ctx, conn); err != nil {
			return err
		}
		for _, resp := range conn.DoMulti(ctx, cmds...) {
			if err := resp.Error(); err != nil {
				return err
			}
		}
		f.hub.mu.Lock()
		defer f.hub.mu.Unlock()
		for _, ch := range part {
			// Somebody may have come meanwhile: then it is placed again.
			if ch.feed == f {
				f.evict(ch)
			}
			if len(ch.listeners) > 0 {
				f.hub.wakePlacer()
			}
		}
		return nil
	})
}

// notBusy returns an error if the server is busy with a script. It would refuse to end a
// subscription, and rueidis panics when that is refused: the connection is given up
// instead, which ends the subscription as well.
func notBusy(ctx context.Context, conn rueidis.DedicatedClient) error {
	err := conn.Do(ctx, conn.B().Ping().Build()).Error()
	if reply, ok := rueidis.IsRedisErr(err); ok && !strings.HasPrefix(reply.Error(), "BUSY") {
		return nil
	}
	return err
}

func (f *feed) send(chs []*channel, do func(ctx context.Context, part []*channel) error) error {
	for len(chs) > 0 {
		part := chs[:min(chunk, len(chs))]
		chs = chs[len(part):]
		ctx, cancel := context.WithTimeout(f.ctx, subscribeTimeout)
		err := do(ctx, part)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// confirmed runs on the reading goroutine for every confirmation.
func (f *feed) confirmed(s rueidis.PubSubSubscription) {
	h := f.hub
	h.mu.Lock()
	ch := h.channels[s.Channel]
	if ch == nil || ch.feed != f {
		h.mu.Unlock()
		return
	}
	switch s.Kind {
	case "subscribe", "ssubscribe":
		if ch.state == on && ch.syncing {
			h.notify(ch.synced(f), Event{CaughtUp: true}) // releases the mutex
			return
		}
		if ch.state != asked {
			break
		}
		ch.state = on
		ch.notBefore = time.Time{}
		back := f.isUp()
		for _, s := range ch.listeners {
			s.sync = synced // of the connection before
		}
		if len(ch.listeners) > 0 {
			h.notify(ch.listeners, Event{Subscribed: true}) // releases the mutex
		} else {
			f.change(ch) // whoever asked has left already
			h.mu.Unlock()
		}
		if back {
			h.log.Info("redlatch: subscriber connection is back", "addr", f.addr)
			if h.opts.OnReconnect != nil {
				h.opts.OnReconnect()
			}
		}
		return
	case "unsubscribe", "sunsubscribe":
		// Unasked for: the slot has moved to another node.
		if ch.state == on || ch.state == asked {
			f.evict(ch)
			h.wakePlacer()
		}
	}
	h.mu.Unlock()
}

// isUp notes that the connection works, and reports whether it replaces one
// that was lost. The hub's mutex is held.
func (f *feed) isUp() bool {
	if f.up {
		return false
	}
	f.up = true
	if h := f.hub; h.retries[f.addr].failures > 0 {
		delete(h.retries, f.addr)
		h.stats.Reconnects++
		return true
	}
	return false
}

// refused handles an error reply to a subscription: the slot lives elsewhere,
// or the server does not want it.
func (f *feed) refused(ch *channel, err *rueidis.RedisError) {
	h := f.hub
	h.mu.Lock()
	if ch.feed != f {
		h.mu.Unlock()
		return
	}
	f.evict(ch)
	h.wakePlacer()
	_, moved := err.IsMoved()
	first := false
	switch {
	case moved || err.IsClusterDown() || err.IsTryAgain():
		ch.notBefore = time.Now().Add(minBackoff)
	case err.IsLoading() || strings.HasPrefix(err.Error(), "BUSY") || strings.HasPrefix(err.Error(), "MASTERDOWN"):
		ch.notBefore = time.Now().Add(maxBackoff)
	default:
		ch.notBefore = time.Now().Add(deniedBackoff)
		first, h.denied = !h.denied, true
	}
	h.mu.Unlock()
	if first {
		h.log.Warn("redlatch: the server refuses a subscription, waiters poll instead: "+
			"let this user subscribe to the channels of its locks", "channel", ch.name, "error", err)
	}
}
