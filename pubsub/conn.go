package pubsub

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/rueidis"
)

// conn is one subscriber connection with its channels. A lost connection is replaced by
// a new conn. The hub's mutex guards its fields.
type conn struct {
	hub      *Hub
	addr     string
	ctx      context.Context // ends with the hub or when the node leaves
	cancel   context.CancelFunc
	channels map[*channel]struct{}
	changed  map[*channel]struct{} // may need a SUBSCRIBE or UNSUBSCRIBE
	wake     chan struct{}
	up       bool
}

// markChanged schedules a comparison of ch's state with whether it has listeners. The
// hub's mutex is held.
func (c *conn) markChanged(ch *channel) {
	c.changed[ch] = struct{}{}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// run serves the connection until it breaks, its node leaves, or the hub is closed.
func (c *conn) run(node rueidis.Client) {
	defer c.cancel()
	err := c.connect(node)

	h := c.hub
	h.mu.Lock()
	delete(h.conns, c.addr)
	for ch := range c.channels {
		c.detach(ch)
	}
	h.wakeAssigner()
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
		h.log.Warn("redlatch: subscriber connection lost; waiters poll until it is restored", "addr", c.addr, "error", err)
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
	var client rueidis.DedicatedClient
	select {
	case client = <-dedicated:
	case <-c.ctx.Done():
		go func() { (<-dedicated).Close() }()
		return c.ctx.Err()
	}
	// Close instead of the release function: a connection with subscriptions must not
	// return to the pool.
	defer client.Close()
	broken := client.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage:      func(m rueidis.PubSubMessage) { c.deliver(m.Channel, m.Message) },
		OnSubscription: c.onSubscription,
	})
	return c.serve(client, broken)
}

// detach removes a channel from the connection. If it has listeners it becomes
// unassigned. The hub's mutex is held.
func (c *conn) detach(ch *channel) {
	h := c.hub
	delete(c.channels, ch)
	delete(c.changed, ch)
	ch.conn, ch.state = nil, unsubscribed
	if len(ch.listeners) == 0 {
		delete(h.channels, ch.name)
		return
	}
	h.unassigned[ch] = struct{}{}
	h.stale = true
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
		if err := c.unsubscribe(client, unsubscribe); err != nil {
			return err
		}
		if err := c.subscribe(client, subscribe); err != nil {
			return err
		}
	}
}

func (c *conn) takeChanges() (subscribe, unsubscribe []*channel) {
	c.hub.mu.Lock()
	defer c.hub.mu.Unlock()
	for ch := range c.changed {
		delete(c.changed, ch)
		wanted := len(ch.listeners) > 0
		switch {
		case ch.state == unsubscribed && wanted:
			ch.state = subscribing
			subscribe = append(subscribe, ch)
		case ch.state == unsubscribed:
			c.detach(ch)
		case ch.state == subscribed && !wanted:
			ch.state = unsubscribing
			unsubscribe = append(unsubscribe, ch)
		case ch.state == subscribing && !wanted:
			// The confirmation triggers another check.
		}
	}
	return subscribe, unsubscribe
}

// chunk bounds the number of channels in one pipeline.
const maxChunk = 256

// subscribe sends one command per channel: channels of different slots cannot share one
// in a cluster, and a refusal then affects a single channel. Confirmations arrive at
// onSubscription.
func (c *conn) subscribe(client rueidis.DedicatedClient, chs []*channel) error {
	return c.send(chs, func(ctx context.Context, chunk []*channel) error {
		cmds := make(rueidis.Commands, len(chunk))
		for i, ch := range chunk {
			if c.hub.opts.Sharded {
				cmds[i] = client.B().Ssubscribe().Channel(ch.name).Build()
			} else {
				cmds[i] = client.B().Subscribe().Channel(ch.name).Build()
			}
		}
		for i, resp := range client.DoMulti(ctx, cmds...) {
			err := resp.Error()
			if err == nil {
				continue
			}
			refusal, isReply := rueidis.IsRedisErr(err)
			if !isReply {
				return err
			}
			c.refused(chunk[i], refusal)
		}
		return nil
	})
}

func (c *conn) unsubscribe(client rueidis.DedicatedClient, chs []*channel) error {
	return c.send(chs, func(ctx context.Context, chunk []*channel) error {
		cmds := make(rueidis.Commands, len(chunk))
		for i, ch := range chunk {
			if c.hub.opts.Sharded {
				cmds[i] = client.B().Sunsubscribe().Channel(ch.name).Build()
			} else {
				cmds[i] = client.B().Unsubscribe().Channel(ch.name).Build()
			}
		}
		if err := notBusy(ctx, client); err != nil {
			return err
		}
		for _, resp := range client.DoMulti(ctx, cmds...) {
			if err := resp.Error(); err != nil {
				return err
			}
		}
		c.hub.mu.Lock()
		defer c.hub.mu.Unlock()
		for _, ch := range chunk {
			// A new listener may have arrived meanwhile; its channel is assigned again.
			if ch.conn == c {
				c.detach(ch)
			}
			if len(ch.listeners) > 0 {
				c.hub.wakeAssigner()
			}
		}
		return nil
	})
}

// notBusy returns an error if the server is busy with a script. A busy server refuses
// UNSUBSCRIBE, on which rueidis panics. Dropping the connection ends the subscriptions
// as well.
func notBusy(ctx context.Context, client rueidis.DedicatedClient) error {
	err := client.Do(ctx, client.B().Ping().Build()).Error()
	if reply, ok := rueidis.IsRedisErr(err); ok && !strings.HasPrefix(reply.Error(), "BUSY") {
		return nil
	}
	return err
}

func (c *conn) send(chs []*channel, do func(ctx context.Context, chunk []*channel) error) error {
	for len(chs) > 0 {
		chunk := chs[:min(maxChunk, len(chs))]
		chs = chs[len(chunk):]
		ctx, cancel := context.WithTimeout(c.ctx, subscribeTimeout)
		err := do(ctx, chunk)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// onSubscription runs on the reading goroutine for every confirmation.
func (c *conn) onSubscription(s rueidis.PubSubSubscription) {
	h := c.hub
	h.mu.Lock()
	ch := h.channels[s.Channel]
	if ch == nil || ch.conn != c {
		h.mu.Unlock()
		return
	}
	switch s.Kind {
	case "subscribe", "ssubscribe":
		if ch.state != subscribing {
			break
		}
		ch.state = subscribed
		ch.notBefore = time.Time{}
		restored := c.markUp()
		if len(ch.listeners) > 0 {
			h.notify(ch.listeners, Event{Subscribed: true}) // releases the mutex
		} else {
			c.markChanged(ch) // its listeners have left
			h.mu.Unlock()
		}
		if restored {
			h.log.Info("redlatch: subscriber connection restored", "addr", c.addr)
			if h.opts.OnReconnect != nil {
				h.opts.OnReconnect()
			}
		}
		return
	case "unsubscribe", "sunsubscribe":
		// Unsolicited: the slot has moved to another node.
		if ch.state == subscribed || ch.state == subscribing {
			c.detach(ch)
			h.wakeAssigner()
		}
	}
	h.mu.Unlock()
}

// markUp records that the connection works. It reports whether it replaces a lost one.
// The hub's mutex is held.
func (c *conn) markUp() bool {
	if c.up {
		return false
	}
	c.up = true
	if h := c.hub; h.retries[c.addr].failures > 0 {
		delete(h.retries, c.addr)
		h.stats.Reconnects++
		return true
	}
	return false
}

// refused handles an error reply to a subscription: the slot has moved, or the server
// denies the subscription.
func (c *conn) refused(ch *channel, err *rueidis.RedisError) {
	h := c.hub
	h.mu.Lock()
	if ch.conn != c {
		h.mu.Unlock()
		return
	}
	c.detach(ch)
	h.wakeAssigner()
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
		h.log.Warn("redlatch: subscription refused; waiters poll instead: "+
			"allow this user to subscribe to the channels of its locks", "channel", ch.name, "error", err)
	}
}
