package acquire

import (
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

const (
	// reserveSize is the number of ids that are reserved together: one SUBSCRIBE for as many
	// waiters.
	reserveSize = 8
	// maxOwn is the number of own channels of a key above which none is reserved. Thousands of
	// waiters need few: only one of them is the head.
	maxOwn = 64
)

// reserve has ids for later requests for an Ordered key, and listens to their channels. A waiter
// that gets such an id hears all messages since its first attempt. It neither subscribes when it
// becomes the head nor makes another attempt because of that.
//
// It exists from the first wait on, and is filled by the second one, so that a key without
// contention costs nothing. It ends when the process has not used the key for a while.
type reserve[A Acquirer[A]] struct {
	queues *Queues[A]
	shard  *shard[A]
	key    Key
	ids    []*ownChannel[A] // that no request has
	own    int              // channels of these and of waiters that have had one of these
	used   bool             // since the timer was set
	timer  watchdog.Timer
}

// ownChannel is the channel of one id. The mutex of the shard guards it.
type ownChannel[A Acquirer[A]] struct {
	shard       *shard[A]
	reserve     *reserve[A] // nil: it was not reserved
	id          lock.Owner
	entry       *entry[A]  // of the request that has the id; nil: none, or it is over
	waiter      *waiter[A] // nil: the request does not wait yet
	unsubscribe func()
}

// identify gives an Ordered request its id.
func (e *entry[A]) identify(req *Request[A]) {
	if req.ID == nil {
		return
	}
	r := e.shard.reserves[e.key]
	if r != nil {
		r.used = true
	}
	if r == nil || len(r.ids) == 0 || req.Once {
		*req.ID = e.queues.cfg.NewOwner()
		return
	}
	c := r.ids[0]
	r.ids[0], r.ids = nil, r.ids[1:]
	c.entry, req.own = e, c
	*req.ID = c.id
}

// listen subscribes to the own channel of the head, and to channels for later waiters.
func (e *entry[A]) listen() {
	w, s := e.first, e.shard
	w.req.own = &ownChannel[A]{shard: s, id: *w.req.ID, entry: e, waiter: w}
	r := s.reserves[e.key]
	if r != nil {
		r.subscribe(w.req.Channel, append(r.more(), w.req.own))
		return
	}
	r = &reserve[A]{queues: e.queues, shard: s, key: e.key}
	if s.reserves == nil {
		s.reserves = make(map[Key]*reserve[A])
	}
	s.reserves[e.key] = r
	r.schedule()
	r.subscribe(w.req.Channel, []*ownChannel[A]{w.req.own})
}

// refill reserves ids if few are left, and the head waits for another process.
func (e *entry[A]) refill() {
	req := &e.first.req
	if req.own != nil && req.own.reserve != nil && len(e.holders) == 0 {
		req.own.reserve.subscribe(req.Channel, req.own.reserve.more())
	}
}

// more returns what is to be added to the reserve.
func (r *reserve[A]) more() []*ownChannel[A] {
	if len(r.ids) > reserveSize/2 || r.own+reserveSize > maxOwn {
		return nil
	}
	more := make([]*ownChannel[A], reserveSize, reserveSize+1)
	for i := range more {
		more[i] = &ownChannel[A]{shard: r.shard, reserve: r, id: r.queues.cfg.NewOwner()}
	}
	r.ids, r.own = append(r.ids, more...), r.own+len(more)
	return more
}

// subscribe subscribes to own channels, which have the name of that channel and their ids. The hub
// does not call back from here.
func (r *reserve[A]) subscribe(channel string, own []*ownChannel[A]) {
	if len(own) == 0 {
		return
	}
	names, listeners := make([]string, len(own)), make([]pubsub.Listener, len(own))
	for i, c := range own {
		names[i], listeners[i] = channel+":"+c.id.String(), c
	}
	for i, unsubscribe := range r.queues.cfg.SubscribeOwn(names, listeners) {
		own[i].unsubscribe = unsubscribe
	}
}

func (r *reserve[A]) schedule() {
	r.queues.cfg.Wheel.Schedule(&r.timer, time.Now().Add(pubsub.DefaultKeepWarm), r)
}

// Expire implements watchdog.Expirer. It locks the mutex.
func (r *reserve[A]) Expire(time.Time) {
	r.shard.mu.Lock()
	defer r.shard.mu.Unlock()
	if inUse := r.shard.entries[r.key] != nil; r.used || inUse {
		r.used = inUse
		r.schedule()
		return
	}
	for _, c := range r.ids {
		c.close()
	}
	delete(r.shard.reserves, r.key)
}

// close ends the subscription. A nil channel is none.
func (c *ownChannel[A]) close() {
	if c == nil {
		return
	}
	if c.reserve != nil {
		c.reserve.own--
	}
	c.entry, c.waiter = nil, nil
	c.unsubscribe()
}

// Notify implements pubsub.Listener. It locks the mutex.
func (c *ownChannel[A]) Notify(ev pubsub.Event) {
	cause := telemetry.Message
	if ev.Subscribed {
		cause = telemetry.Subscribed
	}
	c.shard.mu.Lock()
	defer c.shard.mu.Unlock()
	switch e, w := c.entry, c.waiter; {
	case e == nil:
	case w != nil && w.state == claimed:
		// The attempt may have been too early. A reason for the head would not do: with the reply
		// another waiter can become the head.
		w.again = true
	case w == nil || w == e.first: // w is nil during the first attempt, which makes it the head
		e.nudge(cause)
	case w.state == waiting: // the head is another one on the server, or a message may be lost
		w.register(false)
		w.signal()
	}
}
