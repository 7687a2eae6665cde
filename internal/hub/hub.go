// Package hub notifies the objects of a client of messages on Redis channels. All
// objects share one subscriber connection (one per primary with sharded pub/sub), and
// all listeners of a channel share one subscription.
//
// Messages are hints and may be lost. The hub notifies a listener when it has subscribed again,
// but not when the connection is lost, so waiters must also poll at intervals. No operation fails
// because of pub/sub: if the connection is down or subscribing is forbidden, the hub keeps trying
// while its listeners poll.
package hub

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/pubsub"
)

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
	// KeepWarm is how long a channel stays subscribed after its last listener has left, and up to
	// a second more, because channels are unsubscribed together. 0 means DefaultKeepWarm, and a
	// negative value no time.
	KeepWarm time.Duration
	// Logger receives warnings about the connection; nil means none.
	Logger *slog.Logger
	// OnReconnect is called when a lost connection has been restored. It must not
	// block. It may be nil.
	OnReconnect func()
}

const (
	// DefaultKeepWarm keeps an occasionally contended lock from subscribing and
	// unsubscribing each time.
	DefaultKeepWarm = 5 * time.Second

	// maxChannels is the number of channels above which none stays subscribed without a
	// listener.
	maxChannels = 10_000

	topologyTimeout = 3 * time.Second
	// subscribeTimeout bounds a batch of subscriptions; the connection is dropped when
	// it passes, with all of its subscriptions. It is generous because rueidis detects
	// a silent server sooner, and a slow one may have many channels to subscribe.
	subscribeTimeout = 15 * time.Second

	// dedicateTime is how long a connection may take before the wait for it is logged.
	dedicateTime = time.Second

	minBackoff = 50 * time.Millisecond
	maxBackoff = time.Second
	// deniedBackoff is for errors that last, such as a missing permission.
	deniedBackoff = 30 * time.Second
)

// Hub shares subscriptions among listeners. It is safe for concurrent use.
type Hub struct {
	client rueidis.Client
	opts   Options

	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{} // wakes assign
	done   sync.WaitGroup

	mu         sync.Mutex
	channels   map[string]*channel
	unassigned map[*channel]struct{} // wanted, without a connection
	conns      map[string]*conn      // by node address
	retries    map[string]retry      // by node address, while it fails
	messages   uint64
	reconnects uint64
	stale      bool // slots may have moved since the last refresh
	denied     bool // a refused subscription was logged
	started    bool
	closed     bool
}

type retry struct {
	failures int
	at       time.Time
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
	cooling   *time.Timer // ends the time for which it is kept warm
	notBefore time.Time   // earliest retry after a refusal
	alone     bool        // it shares no SUBSCRIBE, because a shared one was refused
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
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Hub{
		client:     client,
		opts:       opts,
		wake:       make(chan struct{}, 1),
		channels:   make(map[string]*channel),
		unassigned: make(map[*channel]struct{}),
		conns:      make(map[string]*conn),
		retries:    make(map[string]retry),
		stale:      true,
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
		h.wakeAssignerLocked()
	}

	if ch.cooling != nil {
		ch.cooling.Stop()
	}
	s = &Subscription{hub: h, ch: ch, listener: l}
	ch.listeners = append(ch.listeners, s)
	return s, ch.state == subscribed
}

// Subscribed reports whether the server has confirmed a channel, which may have no listener any more.
func (h *Hub) Subscribed(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	ch := h.channels[name]
	return ch != nil && (ch.state == subscribed || ch.state == unsubscribing)
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
	ch := s.ch
	at := slices.Index(ch.listeners, s)
	ch.listeners = slices.Delete(ch.listeners, at, at+1)
	switch {
	case len(ch.listeners) > 0 || h.closed:
	case !warm || h.opts.KeepWarm < 0 || len(h.channels) > maxChannels:
		h.dropLocked(ch)
	case ch.cooling == nil:
		ch.cooling = time.AfterFunc(h.opts.KeepWarm, func() { h.cooled(ch) })
	default:
		ch.cooling.Reset(h.opts.KeepWarm)
	}
}

// cooled removes a channel that was kept warm for long enough.
func (h *Hub) cooled(ch *channel) {
	h.mu.Lock()
	defer h.mu.Unlock()
	// It may have a new listener, or a successor of the same name.
	if len(ch.listeners) == 0 && h.channels[ch.name] == ch {
		h.dropLocked(ch)
	}
}

// dropLocked removes a channel without listeners.
func (h *Hub) dropLocked(ch *channel) {
	if ch.conn != nil {
		ch.conn.markChangedLocked(ch)
		return
	}
	delete(h.unassigned, ch)
	delete(h.channels, ch.name)
}

// Stats returns a snapshot of the hub's counters.
func (h *Hub) Stats() pubsub.Stats {
	h.mu.Lock()
	defer h.mu.Unlock()

	now := time.Now()
	s := pubsub.Stats{Channels: len(h.channels), Messages: h.messages, Reconnects: h.reconnects}
	for _, ch := range h.channels {
		s.Listeners += len(ch.listeners)
		if ch.state == subscribed {
			s.Subscribed++
		} else if ch.notBefore.After(now) {
			s.Refused++
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
	h.mu.Unlock()
	h.cancel()
	h.done.Wait()
}

// wakeAssignerLocked makes assign run soon.
func (h *Hub) wakeAssignerLocked() {
	if !h.started {
		h.started = true
		h.done.Go(h.assign)
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// deliver passes a message to the channel's listeners. It runs on the reading goroutine of
// a connection.
func (h *Hub) deliver(m rueidis.PubSubMessage) {
	h.mu.Lock()
	h.messages++
	var listeners []Listener
	if ch := h.channels[m.Channel]; ch != nil {
		listeners = ch.listenersLocked()
	}
	h.mu.Unlock()
	notify(listeners, Event{Payload: m.Message})
}

// listenersLocked returns the listeners of a channel, for notify.
func (ch *channel) listenersLocked() []Listener {
	listeners := make([]Listener, len(ch.listeners))
	for i, s := range ch.listeners {
		listeners[i] = s.listener
	}
	return listeners
}

// notify calls listeners. They may hold locks under which they call the hub, so the hub's mutex is not
// locked.
func notify(listeners []Listener, ev Event) {
	for _, l := range listeners {
		l.Notify(ev)
	}
}
