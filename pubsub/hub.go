// Package pubsub notifies the objects of a client of messages on Redis channels. All
// objects share one subscriber connection (one per primary with sharded pub/sub), and
// all listeners of a channel share one subscription.
//
// Messages are hints. The hub only promises to notify a listener whenever a message may
// have been missed. Waiters must therefore also poll at intervals. In return, no
// operation fails because of pub/sub: if the connection is down or subscribing is
// forbidden, the hub keeps trying while its listeners poll.
package pubsub

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// Mode is the kind of pub/sub that the processes on a server have agreed on. Messages
// of one kind do not reach subscribers of the other.
type Mode uint8

const (
	// Auto is Sharded in a cluster whose nodes support sharded pub/sub (Redis and
	// Valkey from 7.0), and Plain everywhere else, which is Redisson's default.
	Auto Mode = iota
	// Sharded uses SPUBLISH and SSUBSCRIBE.
	Sharded
	// Plain uses PUBLISH and SUBSCRIBE.
	Plain
)

// String returns "auto", "sharded" or "plain".
func (m Mode) String() string {
	switch m {
	case Sharded:
		return "sharded"
	case Plain:
		return "plain"
	default:
		return "auto"
	}
}

// Event is a message or a change of the subscription.
type Event struct {
	// Subscribed is true if the server has just confirmed the subscription, for the
	// first time or after a reconnect: earlier messages may have been missed.
	Subscribed bool
	// Payload is the text of a message.
	Payload string
}

// Listener receives the events of one channel. Notify runs on the goroutine that reads
// the connection: it must not block and must not call the hub.
type Listener interface {
	Notify(Event)
}

// Options configure a Hub.
type Options struct {
	// Sharded selects SSUBSCRIBE, on the primary that owns a channel's slot.
	// It needs a cluster client.
	Sharded bool
	// KeepWarm is how long a channel stays subscribed after its last listener has left;
	// 0 means DefaultKeepWarm, a negative value not at all.
	KeepWarm time.Duration
	// Logger receives warnings about the connection; nil means none.
	Logger *slog.Logger
	// OnReconnect is called when a lost connection has been restored. It must not
	// block. It may be nil.
	OnReconnect func()
}

const (
	// DefaultKeepWarm spares an occasionally contended lock from subscribing and
	// unsubscribing each time.
	DefaultKeepWarm = 5 * time.Second

	// maxWarm bounds the number of channels kept subscribed without a listener.
	maxWarm = 4096

	topologyTimeout = 3 * time.Second
	// subscribeTimeout bounds a batch of subscriptions; the connection is dropped when
	// it passes, with all of its subscriptions. It is generous because rueidis detects
	// a silent server sooner, and a slow one may have many channels to subscribe.
	subscribeTimeout = 15 * time.Second

	minBackoff = 50 * time.Millisecond
	maxBackoff = time.Second
	// deniedBackoff is for errors that last, such as a missing permission.
	deniedBackoff = 30 * time.Second
)

// Stats is a snapshot of a hub, for debugging and metrics.
type Stats struct {
	Listeners   int    // open subscriptions
	Channels    int    // channels with a listener or kept warm
	Subscribed  int    // channels confirmed by the server
	Connections int    // live subscriber connections
	Messages    uint64 // messages received in total
	Reconnects  uint64 // lost connections that were replaced
}

// Hub shares subscriptions among listeners. It is safe for concurrent use.
type Hub struct {
	client rueidis.Client
	opts   Options
	log    *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{} // wakes assign
	done   sync.WaitGroup

	mu         sync.Mutex
	channels   map[string]*channel
	unassigned map[*channel]struct{} // wanted, without a connection
	conns      map[string]*conn      // by node address
	retries    map[string]retry      // by node address, while it fails
	warm       []warmed              // channels without listeners, oldest first
	sweeper    *time.Timer
	stats      Stats
	stale      bool // slots may have moved since the last refresh
	denied     bool // a refused subscription was logged
	started    bool
	closed     bool
}

type retry struct {
	failures int
	at       time.Time
}

type warmed struct {
	ch    *channel
	since time.Time
}

// channel is one subscribed name. The hub's mutex guards its fields. Its states:
//
//	unsubscribed ──(assigned)──▶ subscribing ──(confirmed)──▶ subscribed ──(no listener)──▶ unsubscribing ──▶ gone
//	     ▲                            │                           │                              │
//	     └───────(connection lost, slot moved)────────────────────┴───────(new listener)─────────┘
type channel struct {
	name      string
	listeners []*Subscription
	conn      *conn
	state     channelState
	idleSince time.Time // zero while it has listeners
	notBefore time.Time // earliest retry after a refusal
}

type channelState uint8

const (
	unsubscribed channelState = iota
	subscribing
	subscribed
	unsubscribing
)

// Subscription is one listener's registration on a channel.
type Subscription struct {
	hub      *Hub
	ch       *channel
	listener Listener
	closed   bool
}

// New returns a hub that uses client, which the caller must close. It connects on the
// first Subscribe.
func New(client rueidis.Client, opts Options) *Hub {
	if opts.KeepWarm == 0 {
		opts.KeepWarm = DefaultKeepWarm
	}
	h := &Hub{
		client:     client,
		opts:       opts,
		log:        opts.Logger,
		wake:       make(chan struct{}, 1),
		channels:   make(map[string]*channel),
		unassigned: make(map[*channel]struct{}),
		conns:      make(map[string]*conn),
		retries:    make(map[string]retry),
		stale:      true,
	}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// Subscribe registers a listener on a channel. It neither blocks nor fails. confirmed
// is true if the server has already confirmed the channel; otherwise an event with
// Subscribed set follows. A closed hub delivers no events. The caller must close the
// subscription.
func (h *Hub) Subscribe(name string, l Listener) (s *Subscription, confirmed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return &Subscription{hub: h, closed: true}, false
	}
	ch := h.channels[name]
	if ch == nil {
		ch = &channel{name: name}
		h.channels[name] = ch
		h.unassigned[ch] = struct{}{}
		h.wakeAssigner()
	}
	s = &Subscription{hub: h, ch: ch, listener: l}
	ch.listeners = append(ch.listeners, s)
	ch.idleSince = time.Time{}
	h.stats.Listeners++
	return s, ch.state == subscribed
}

// Close ends the subscription. Repeated calls have no effect. It does not block. A
// concurrent event may still be delivered.
func (s *Subscription) Close() { s.close(true) }

// Discard is Close for a channel that is not needed again: it is not kept warm.
func (s *Subscription) Discard() { s.close(false) }

func (s *Subscription) close(warm bool) {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	h.stats.Listeners--
	ch := s.ch
	for i, other := range ch.listeners {
		if other == s {
			last := len(ch.listeners) - 1
			ch.listeners[i] = ch.listeners[last]
			ch.listeners[last] = nil
			ch.listeners = ch.listeners[:last]
			break
		}
	}
	switch {
	case len(ch.listeners) > 0 || h.closed:
	case warm:
		h.keepWarm(ch)
	default:
		ch.idleSince = time.Now()
		h.drop(ch)
	}
}

// Stats returns a snapshot of the hub's counters.
func (h *Hub) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.Channels = len(h.channels)
	for _, ch := range h.channels {
		if ch.state == subscribed {
			s.Subscribed++
		}
	}
	for _, c := range h.conns {
		if c.up {
			s.Connections++
		}
	}
	return s
}

// Close ends all subscriptions and connections and waits for the hub's goroutines. It
// must not be called from a Listener.
func (h *Hub) Close() {
	h.mu.Lock()
	h.closed = true
	if h.sweeper != nil {
		h.sweeper.Stop()
	}
	h.mu.Unlock()
	h.cancel()
	h.done.Wait()
}

// keepWarm schedules ch, which has lost its last listener, for removal. h.mu is held.
func (h *Hub) keepWarm(ch *channel) {
	ch.idleSince = time.Now()
	if h.opts.KeepWarm < 0 {
		h.drop(ch)
		return
	}
	h.warm = append(h.warm, warmed{ch, ch.idleSince})
	if len(h.warm) > maxWarm {
		h.expireWarm(h.warm[0])
		h.warm = h.warm[1:]
	}
	switch {
	case h.sweeper == nil:
		h.sweeper = time.AfterFunc(h.opts.KeepWarm, h.sweep)
	case len(h.warm) == 1:
		h.sweeper.Reset(h.opts.KeepWarm)
	}
}

// sweep removes the channels whose time without a listener is over.
func (h *Hub) sweep() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.warm) > 0 && !h.closed {
		if wait := h.opts.KeepWarm - time.Since(h.warm[0].since); wait > 0 {
			h.sweeper.Reset(wait)
			return
		}
		h.expireWarm(h.warm[0])
		h.warm = h.warm[1:]
	}
	if len(h.warm) == 0 {
		h.warm = nil // frees the consumed front of the slice
	}
}

func (h *Hub) expireWarm(w warmed) {
	// A channel used since then has a later entry or none. One that was removed with
	// its connection may have a successor of the same name.
	if w.ch.idleSince.Equal(w.since) && h.channels[w.ch.name] == w.ch {
		h.drop(w.ch)
	}
}

// drop removes a channel without listeners. h.mu is held.
func (h *Hub) drop(ch *channel) {
	if ch.conn != nil {
		ch.conn.markChanged(ch)
		return
	}
	delete(h.unassigned, ch)
	delete(h.channels, ch.name)
}

func (h *Hub) wakeAssigner() {
	if !h.started {
		h.started = true
		h.done.Go(h.assign)
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// deliver passes a message to the channel's listeners. It runs on the reading goroutine
// of the connection. Messages from a connection that no longer serves the channel are
// dropped: they have no order relative to those of the new connection, whose
// confirmation makes listeners poll anyway.
func (c *conn) deliver(name, payload string) {
	h := c.hub
	h.mu.Lock()
	h.stats.Messages++
	ch := h.channels[name]
	if ch == nil || ch.conn != c {
		h.mu.Unlock()
		return
	}
	h.notify(ch.listeners, Event{Payload: payload})
}

// notify calls listeners. h.mu is held, and released first: listeners may hold locks
// under which they call the hub.
func (h *Hub) notify(subs []*Subscription, ev Event) {
	if len(subs) == 1 {
		l := subs[0].listener
		h.mu.Unlock()
		l.Notify(ev)
		return
	}
	listeners := make([]Listener, len(subs))
	for i, s := range subs {
		listeners[i] = s.listener
	}
	h.mu.Unlock()
	for _, l := range listeners {
		l.Notify(ev)
	}
}
