package hub

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/wire"
)

// conn is one subscriber connection. A lost connection is replaced by a new conn. The hub's
// mutex guards its fields.
type conn struct {
	hub     *Hub
	addr    string
	ctx     context.Context // ends with the hub or when the node leaves
	cancel  context.CancelFunc
	changed map[*channel]struct{} // may need a SUBSCRIBE or UNSUBSCRIBE
	wake    chan struct{}
	up      bool

	unwanted map[*channel]struct{} // may need an UNSUBSCRIBE
	since    time.Time             // when the first of these was added
	overdue  *time.Timer           // for the first of these
}

// Channels are unsubscribed together, when there are maxUnwanted or unwantedFor after the first:
// each waiter of a fair lock has a channel of its own.
const (
	maxUnwanted = 128
	unwantedFor = time.Second
)

func newConn(h *Hub, addr string) *conn {
	c := &conn{
		hub: h, addr: addr, wake: make(chan struct{}, 1),
		changed: make(map[*channel]struct{}), unwanted: make(map[*channel]struct{}),
	}
	c.ctx, c.cancel = context.WithCancel(h.ctx)
	c.overdue = time.AfterFunc(unwantedFor, c.signal)
	c.overdue.Stop()
	return c
}

// markChangedLocked schedules a comparison of ch's state with whether it has listeners.
func (c *conn) markChangedLocked(ch *channel) {
	if ch.state != subscribed || len(ch.listeners) > 0 {
		c.changed[ch] = struct{}{}
		c.signal()
		return
	}

	c.unwanted[ch] = struct{}{}
	switch len(c.unwanted) {
	case 1:
		c.since = time.Now()
		c.overdue.Reset(unwantedFor)
	case maxUnwanted:
		c.signal()
	}
}

// signal wakes serve.
func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// run serves the connection until it breaks, its node leaves, or the hub is closed.
func (c *conn) run(node rueidis.Client) {
	defer c.cancel()
	defer c.overdue.Stop()

	err := c.connect(node)

	h := c.hub
	h.mu.Lock()
	delete(h.conns, c.addr)
	for _, ch := range h.channels {
		if ch.conn == c {
			c.detachLocked(ch)
		}
	}

	if c.ctx.Err() != nil { // ended on purpose
		h.mu.Unlock()
		return
	}

	r := h.retries[c.addr]
	r.failures++
	delay := min(minBackoff<<min(r.failures-1, 10), maxBackoff)
	r.at = time.Now().Add(delay/2 + rand.N(delay/2))
	h.retries[c.addr] = r
	h.mu.Unlock()
	if r.failures == 1 {
		h.opts.Logger.Warn("redlatch: subscriber connection lost; waiters poll until it is restored", "addr", c.addr, "error", err)
	}
}

// connect opens a dedicated connection and serves it.
func (c *conn) connect(node rueidis.Client) error {
	// Dedicate takes no context and blocks while the pool is exhausted.
	dedicated := make(chan rueidis.DedicatedClient, 1)
	go func() {
		client, _ := node.Dedicate()
		dedicated <- client
	}()
	late := time.NewTimer(dedicateTime)
	defer late.Stop()

	var client rueidis.DedicatedClient
	for client == nil {
		select {
		case client = <-dedicated:
		case <-late.C:
			c.hub.opts.Logger.Warn("redlatch: no connection for subscriptions yet; waiters poll. All connections of BlockingPoolSize are in use, or the server does not answer", "addr", c.addr)
		case <-c.ctx.Done():
			go func() { (<-dedicated).Close() }()
			return c.ctx.Err()
		}
	}

	// Close instead of the release function: a connection with subscriptions must not
	// return to the pool.
	defer client.Close()

	broken := client.SetPubSubHooks(rueidis.PubSubHooks{OnMessage: c.hub.deliver, OnSubscription: c.onSubscription})
	return c.serve(client, broken)
}

// detachLocked removes a channel from the connection. If it has listeners it becomes unassigned.
func (c *conn) detachLocked(ch *channel) {
	h := c.hub
	delete(c.changed, ch)
	delete(c.unwanted, ch)
	ch.conn = nil
	ch.state = unsubscribed
	if len(ch.listeners) == 0 {
		delete(h.channels, ch.name)
		return
	}

	h.unassigned[ch] = struct{}{}
	h.stale = true
	h.wakeAssignerLocked()
}

func (c *conn) serve(client rueidis.DedicatedClient, broken <-chan error) error {
	for {
		select {
		case err := <-broken:
			if err == nil {
				err = errors.New("connection closed")
			}
			return err
		case <-c.ctx.Done():
			return c.ctx.Err()
		case <-c.wake:
		}
		subscribe, unsubscribe := c.takeChanges()
		if err := c.send(client, unsubscribe, false); err != nil {
			return err
		}
		if err := c.send(client, subscribe, true); err != nil {
			return err
		}
	}
}

func (c *conn) takeChanges() (subscribe, unsubscribe []*channel) {
	c.hub.mu.Lock()
	defer c.hub.mu.Unlock()

	for ch := range c.changed {
		delete(c.changed, ch)
		if ch.state == unsubscribed && len(ch.listeners) > 0 {
			ch.state = subscribing
			subscribe = append(subscribe, ch)
		} else if ch.state == unsubscribed {
			c.detachLocked(ch)
		}

		// The confirmation of a subscribing channel triggers another check.
	}

	if len(c.unwanted) < maxUnwanted && time.Since(c.since) < unwantedFor {
		return subscribe, nil
	}

	for ch := range c.unwanted {
		delete(c.unwanted, ch)
		if ch.state == subscribed && len(ch.listeners) == 0 {
			ch.state = unsubscribing
			unsubscribe = append(unsubscribe, ch)
		}
	}

	return subscribe, unsubscribe
}

// maxChunk bounds the number of channels in one pipeline.
const maxChunk = 256

// send subscribes or unsubscribes channels.
func (c *conn) send(client rueidis.DedicatedClient, chs []*channel, subscribe bool) error {
	for chunk := range slices.Chunk(chs, maxChunk) {
		if err := c.sendChunk(client, chunk, subscribe); err != nil {
			return err
		}
	}
	return nil
}

func (c *conn) sendChunk(client rueidis.DedicatedClient, chs []*channel, subscribe bool) error {
	ctx, cancel := context.WithTimeout(c.ctx, subscribeTimeout)
	defer cancel()

	if !subscribe {
		// rueidis sends a PING with UNSUBSCRIBE, and panics if a server refuses one of them in a way that
		// it does not expect: one that is busy with a script, or a replica without its primary. Dropping the
		// connection ends the subscriptions as well.
		if err := client.Do(ctx, client.B().Ping().Build()).Error(); err != nil {
			return err
		}
	}

	parts := c.parts(chs, subscribe)
	cmds := make(rueidis.Commands, len(parts))
	for i, part := range parts {
		names := make([]string, len(part))
		for j, ch := range part {
			names[j] = ch.name
		}
		b := client.B()
		sharded := c.hub.opts.Sharded
		if subscribe && sharded {
			cmds[i] = b.Ssubscribe().Channel(names...).Build()
		} else if subscribe {
			cmds[i] = b.Subscribe().Channel(names...).Build()
		} else if sharded {
			cmds[i] = b.Sunsubscribe().Channel(names...).Build()
		} else {
			cmds[i] = b.Unsubscribe().Channel(names...).Build()
		}
	}

	for i, resp := range client.DoMulti(ctx, cmds...) {
		err := resp.Error()
		_, refused := rueidis.IsRedisErr(err)
		switch {
		case err == nil && subscribe: // onSubscription gets the confirmation
		case err == nil:
			c.hub.mu.Lock()
			for _, ch := range parts[i] {
				c.detachLocked(ch)
			}
			c.hub.mu.Unlock()
		case refused && subscribe:
			c.refused(parts[i], err)
		default:
			return err
		}
	}

	return nil
}

// parts divides channels into those that share a command. With sharded pub/sub these must be of one
// slot. A refusal of SUBSCRIBE affects all of its channels, so these are of one slot too: the waiters
// of a fair lock have one each, and the same permission for all.
func (c *conn) parts(chs []*channel, subscribe bool) (parts [][]*channel) {
	if !subscribe && !c.hub.opts.Sharded {
		return [][]*channel{chs}
	}

	ofSlot := make(map[int]int, len(chs)) // the index in parts
	for _, ch := range chs {
		slot := wire.Slot(ch.name)
		i, ok := ofSlot[slot]
		if subscribe && ch.alone {
			parts = append(parts, []*channel{ch})
		} else if ok {
			parts[i] = append(parts[i], ch)
		} else {
			ofSlot[slot] = len(parts)
			parts = append(parts, []*channel{ch})
		}
	}

	return parts
}

// onSubscription runs on the reading goroutine for every confirmation.
func (c *conn) onSubscription(s rueidis.PubSubSubscription) {
	h := c.hub
	h.mu.Lock()
	ch := h.channels[s.Channel]
	ended := strings.HasSuffix(s.Kind, "unsubscribe")
	if ch == nil || ch.conn != c || !ended && ch.state != subscribing {
		h.mu.Unlock()
		return
	}
	if ended {
		if ch.state != unsubscribing { // unsolicited: the slot has moved to another node
			c.detachLocked(ch)
		}
		h.mu.Unlock()
		return
	}

	ch.state = subscribed
	ch.notBefore = time.Time{}
	restored := !c.up && h.retries[c.addr].failures > 0
	c.up = true
	if restored {
		delete(h.retries, c.addr)
		h.reconnects++
	}
	if len(ch.listeners) == 0 { // they have left
		c.markChangedLocked(ch)
	}

	listeners := ch.listenersLocked()
	h.mu.Unlock()

	notify(listeners, Event{Subscribed: true})
	if restored {
		h.opts.Logger.Info("redlatch: subscriber connection restored", "addr", c.addr)
		if h.opts.OnReconnect != nil {
			h.opts.OnReconnect()
		}
	}
}

// refused handles an error reply to the subscription of channels: the slot has moved, or the server
// denies the subscription. If it denies several together, each is sent again by itself.
func (c *conn) refused(chs []*channel, err error) {
	h := c.hub
	h.mu.Lock()
	first := false
	pause := deniedBackoff
	if wire.IsElsewhere(err) {
		pause = minBackoff
	} else if wire.OutcomeOf(err) == wire.Passing {
		pause = maxBackoff
	} else if len(chs) > 1 {
		pause = 0
	} else {
		first = !h.denied
		h.denied = true
	}

	for _, ch := range chs {
		if ch.conn == c {
			c.detachLocked(ch)
			ch.alone = ch.alone || pause == 0
			ch.notBefore = time.Now().Add(pause)
		}
	}
	h.mu.Unlock()
	if first {
		h.opts.Logger.Warn("redlatch: subscription refused; waiters poll instead: "+
			"allow this user to subscribe to the channels of its locks", "channel", text.Safe(chs[0].name), "error", err)
	}
}
