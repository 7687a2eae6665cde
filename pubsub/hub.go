// Package pubsub is the hub through which every object of a client hears that
// something was released. All objects share one subscriber connection (one per
// primary where pub/sub is sharded), and all waiters of a channel share one
// subscription.
//
// Messages are hints. The hub promises to tell a listener whenever some may
// have been missed, and nothing more: whoever waits must also look again by
// itself after a while. In return nothing ever fails because of pub/sub. When
// the connection is down or subscribing is forbidden, the hub keeps trying and
// its listeners live on their own clocks.
package pubsub

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// Mode says which kind of pub/sub the processes on a server have agreed on.
// The two kinds do not hear each other.
type Mode uint8

const (
	// Auto is Sharded in a cluster whose nodes know sharded pub/sub (Redis and
	// Valkey from 7.0), and Plain everywhere else. It is what Redisson does
	// unless told otherwise.
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

// Event is what a Listener hears.
type Event struct {
	// Subscribed is true when the subscription has just been confirmed by the
	// server, for the first time or again after a disconnection: anything
	// published before may have been missed.
	Subscribed bool
	// CaughtUp is true for the answer to Subscription.Sync: what is heard from here
	// on was published after that call.
	CaughtUp bool
	// Payload is the text of the message, if it is one.
	Payload string
}

// Listener hears the events of one channel. Notify runs on the goroutine that
// reads the connection: it must not block and must not call the hub.
type Listener interface {
	Notify(Event)
}

// Options of a Hub.
type Options struct {
	// Sharded selects SSUBSCRIBE, on the primary that owns a channel's slot.
	// It needs a cluster client.
	Sharded bool
	// KeepWarm is how long a channel stays subscribed after its last listener
	// has left; 0 means DefaultKeepWarm, less than 0 not at all.
	KeepWarm time.Duration
	// Logger for trouble with the connection; nil means none.
	Logger *slog.Logger
	// OnReconnect is called when a connection that was lost is up again. It
	// must not block. It may be nil.
	OnReconnect func()
}

const (
	// DefaultKeepWarm saves the pair of commands that a lock which is contended
	// every now and then would spend on subscribing each time.
	DefaultKeepWarm = 5 * time.Second

	// maxWarm bounds how many channels stay subscribed without a listener.
	maxWarm = 4096

	lookTimeout = 3 * time.Second
	// subscribeTimeout gives a connection up, and with it all subscriptions on
	// it. That a server is silent rueidis notices by itself and sooner; one that
	// is merely slow, with very many channels to subscribe, is better waited for.
	subscribeTimeout = 15 * time.Second

	minBackoff = 50 * time.Millisecond
	maxBackoff = time.Second
	// deniedBackoff is for a missing right or command and the like, which will
	// not be there in a second.
	deniedBackoff = 30 * time.Second
)

// Stats is a snapshot of a hub, for debugging and metrics.
type Stats struct {
	Listeners   int    // subscriptions that were not closed
	Channels    int    // channels with a listener, or kept warm
	Subscribed  int    // of these, the ones the server has confirmed
	Connections int    // subscriber connections that are up
	Messages    uint64 // messages received in all
	Reconnects  uint64 // connections made anew after one was lost
}

// Hub shares subscriptions. Its methods may be called concurrently.
type Hub struct {
	client rueidis.Client
	opts   Options
	log    *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	kick   chan struct{} // to place: something has to be placed
	done   sync.WaitGroup

	mu       sync.Mutex
	channels map[string]*channel
	homeless map[*channel]struct{} // wanted, and on no connection
	feeds    map[string]*feed      // by address of the node
	retries  map[string]retry      // by address, while it fails
	warm     []warmed              // channels without listeners, oldest first
	sweeper  *time.Timer
	stats    Stats
	stale    bool // slots may have moved since the nodes were asked
	denied   bool // a refused subscription was logged
	started  bool
	closed   bool
}

type retry struct {
	failures int
	at       time.Time
}

type warmed struct {
	ch    *channel
	since time.Time
}

// channel is one name somebody listens to. Its fields belong to the hub's
// mutex. Its states:
//
//	off ──(placed on a feed)──▶ asked ──(confirmed)──▶ on ──(nobody left)──▶ leaving ──▶ gone
//	 ▲                            │                    │                       │
//	 └────────(connection lost, slot moved)────────────┴──(somebody came)──────┘
type channel struct {
	name      string
	listeners []*Subscription
	feed      *feed
	state     channelState
	syncing   bool      // it is on, and was asked for once more
	idleSince time.Time // zero while it has listeners
	notBefore time.Time // when to ask again after a refusal
}

type channelState uint8

const (
	off channelState = iota
	asked
	on
	leaving
)

// Subscription is one listener's share in a channel.
type Subscription struct {
	hub      *Hub
	ch       *channel
	listener Listener
	closed   bool
	sync     syncState
}

// syncState is how far a call of Sync has come.
type syncState uint8

const (
	synced   syncState = iota // or never called
	syncDue                   // to be sent
	syncSent                  // its answer is on the way
)

// New returns a hub on client, which stays the caller's. It connects when
// somebody subscribes first.
func New(client rueidis.Client, opts Options) *Hub {
	if opts.KeepWarm == 0 {
		opts.KeepWarm = DefaultKeepWarm
	}
	h := &Hub{
		client:   client,
		opts:     opts,
		log:      opts.Logger,
		kick:     make(chan struct{}, 1),
		channels: make(map[string]*channel),
		homeless: make(map[*channel]struct{}),
		feeds:    make(map[string]*feed),
		retries:  make(map[string]retry),
		stale:    true,
	}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// Subscribe begins to listen to a channel. It does not block and does not
// fail. If the server has confirmed the channel already, confirmed is true;
// otherwise an event with Subscribed set tells when it has. On a closed hub the
// subscription stays silent. It must be closed.
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
		h.homeless[ch] = struct{}{}
		h.wakePlacer()
	}
	s = &Subscription{hub: h, ch: ch, listener: l}
	ch.listeners = append(ch.listeners, s)
	ch.idleSince = time.Time{}
	h.stats.Listeners++
	return s, ch.state == on
}

// Close ends the subscription; calling it again does nothing. It does not
// block. An event that is being delivered may still arrive.
func (s *Subscription) Close() { s.close(true) }

// Discard is Close for a channel that will not be needed again: it is not kept
// warm.
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

// Sync asks how far the messages of the channel have come: an event with CaughtUp
// follows those that were published before the call, and comes after the last of
// several calls. It does not block. Where the channel is not confirmed, or its
// connection is lost before the answer, an event with Subscribed comes instead. It
// is an order of one server: a message that another node of a cluster passes on
// (Plain), or that comes from a replica, may still arrive later.
func (s *Subscription) Sync() {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed || h.closed || s.ch.state != on {
		return
	}
	s.sync = syncDue
	s.ch.feed.change(s.ch)
}

// Stats returns a snapshot.
func (h *Hub) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.Channels = len(h.channels)
	for _, ch := range h.channels {
		if ch.state == on {
			s.Subscribed++
		}
	}
	for _, f := range h.feeds {
		if f.up {
			s.Connections++
		}
	}
	return s
}

// Close ends every subscription and connection and waits for the hub's
// goroutines. It must not be called from a Listener.
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

// keepWarm is called when the last listener of ch has left. h.mu is held.
func (h *Hub) keepWarm(ch *channel) {
	ch.idleSince = time.Now()
	if h.opts.KeepWarm < 0 {
		h.drop(ch)
		return
	}
	h.warm = append(h.warm, warmed{ch, ch.idleSince})
	if len(h.warm) > maxWarm {
		h.coolDown(h.warm[0])
		h.warm = h.warm[1:]
	}
	switch {
	case h.sweeper == nil:
		h.sweeper = time.AfterFunc(h.opts.KeepWarm, h.sweep)
	case len(h.warm) == 1:
		h.sweeper.Reset(h.opts.KeepWarm)
	}
}

// sweep lets go of the channels that have been warm for long enough.
func (h *Hub) sweep() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.warm) > 0 && !h.closed {
		if wait := h.opts.KeepWarm - time.Since(h.warm[0].since); wait > 0 {
			h.sweeper.Reset(wait)
			return
		}
		h.coolDown(h.warm[0])
		h.warm = h.warm[1:]
	}
	if len(h.warm) == 0 {
		h.warm = nil // the consumed front of the slice would never be freed
	}
}

func (h *Hub) coolDown(w warmed) {
	// A channel that was used again meanwhile has a later entry, or none; one
	// that went with its connection may have a successor of the same name.
	if w.ch.idleSince.Equal(w.since) && h.channels[w.ch.name] == w.ch {
		h.drop(w.ch)
	}
}

// drop gives up a channel nobody listens to. h.mu is held.
func (h *Hub) drop(ch *channel) {
	if ch.feed != nil {
		ch.feed.change(ch)
		return
	}
	delete(h.homeless, ch)
	delete(h.channels, ch.name)
}

func (h *Hub) wakePlacer() {
	if !h.started {
		h.started = true
		h.done.Go(h.place)
	}
	select {
	case h.kick <- struct{}{}:
	default:
	}
}

// deliver hands a message to the channel's listeners. It runs on the reading
// goroutine of a feed. What a feed hears that has lost the channel is dropped: it is
// in no order with what its successor hears, and that one's confirmation makes
// everybody look.
func (f *feed) deliver(name, payload string) {
	h := f.hub
	h.mu.Lock()
	h.stats.Messages++
	ch := h.channels[name]
	if ch == nil || ch.feed != f {
		h.mu.Unlock()
		return
	}
	h.notify(ch.listeners, Event{Payload: payload})
}

// notify tells all of some listeners. h.mu is held, and released before they are
// called: they may hold locks under which they call the hub.
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
