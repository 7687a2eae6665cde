package semaphore_test

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
)

// apply applies the reply to a batch: the number of requests served, when to retry, and
// whether the client is in the wait queue.
func (x *walk) apply(r *command, reply []int64) {
	c, n := r.client, int(reply[0])
	c.held = append(c.held, r.batch.requests[:n]...)
	c.waiting = slices.DeleteFunc(c.waiting, func(p *pending) bool { return slices.Contains(r.waiters[:n], p) })
	if len(r.waiters) == 0 {
		return
	}
	most := int64(maxPermits)
	if len(reply) > 3 {
		most = reply[3]
	}
	tooLarge := func(p *pending) bool { return p.permits > most && slices.Contains(r.waiters, p) }
	c.polls = reply[2] == -1
	c.queued, c.woken, c.mayMissExpiry, c.wakeAt = reply[2] == 1, n == len(r.waiters) || tooLarge(r.waiters[n]), false, 0
	if slices.ContainsFunc(c.waiting, tooLarge) {
		x.see("request too large")
		c.waiting = slices.DeleteFunc(c.waiting, tooLarge)
	}
	if c.woken {
		return // the next request retries at once
	}
	retryIn := int64(-1)
	if waited := x.w.now - r.waiters[n].began; c.queued {
		retryIn = c.timeout / 3
	} else if waited < bargingMillis {
		retryIn = bargingMillis - waited
	}
	if reply[1] >= 0 && (retryIn < 0 || reply[1] < retryIn) {
		retryIn = reply[1]
	}
	if retryIn >= 0 {
		c.wakeAt = x.w.now + retryIn
	}
	if retryIn > 0 {
		return
	}
	x.see("immediate retry")
	w := x.w.clone()
	w.messages = nil
	before := w.state()
	b := batch{client: c.id, timeout: c.timeout}
	for _, p := range r.waiters[n:] {
		b.requests = append(b.requests, x.requestOf(p))
	}
	if served, retryIn := x.attempt(w, b); served == 0 && retryIn == 0 && reflect.DeepEqual(w.state(), before) {
		lockstep.Failf("%s retries in a loop", c.id)
	}
}

// send sends a command with a fault. It returns the reply, nil if there is none.
func (x *walk) send(r *command, f fault) []int64 {
	r.sentAt = x.w.now
	x.sent = append(x.sent, r)
	if f == delayed {
		r.unknown = true
		x.see(r.script, f)
		return nil
	}
	denied := ""
	if f == refused {
		denied = "PUBLISH"
		if r.acquires() {
			denied = "INCRBY"
		}
	}
	reply := x.deliver(r, denied)
	if r.client != nil && len(reply) == 2 {
		x.see("wrong clock")
		r.client.skew = 0
		reply = x.deliver(r.accepted(x.w.now+retryTime, r.seq.least), denied)
	}
	switch {
	case f == unanswered:
		r.unknown = true
		x.see(r.script, f)
		return nil
	case reply == nil:
		x.see(r.script, refused)
	default:
		x.see(r.script, max(-2, min(2, reply[0])))
	}
	if r.client != nil {
		r.client.done(r.seq)
	}
	return reply
}

// outcomeUnknown prepares the requests of a command without a reply for their next attempt.
func (x *walk) outcomeUnknown(r *command) {
	r.client.woken = true
	for _, p := range r.waiters {
		p.ids = nil
	}
}

// acquire sends a batch.
func (x *walk) acquire(c *client, waiters []*pending, waits bool, f fault) {
	r := x.command(x.kindOf("acquire"), c)
	b := x.addBatch(r, waiters, waits)
	r.apply = func() []int64 {
		if x.permitSem {
			return x.w.permitAcquire(r.seq, b)
		}
		return x.w.acquire(r.seq, b)
	}
	reply := x.send(r, f)
	switch {
	case reply == nil:
		x.outcomeUnknown(r)
		return
	case !waits:
		c.held = append(c.held, b.requests[:reply[0]]...)
		return
	}
	if len(r.waiters) > 1 && reply[0] > 0 && reply[0] < int64(len(r.waiters)) {
		x.see("batch split")
	}
	if reply[2] == 1 {
		x.see("queued")
	}
	x.apply(r, reply)
}

// release releases permits of the client, or those of others.
func (x *walk) release(c *client, g request, foreign, ifExists bool, waiters []*pending, f fault) {
	r := x.command(x.kindOf("release"), c, itoa(g.permits), wire.Flag(ifExists))
	if !foreign {
		r.releases = g
	}
	if x.permitSem {
		r.args = append(r.args, g.ids...)
		b := x.addBatch(r, waiters, true)
		r.apply = func() []int64 { return x.w.permitRelease(r.seq, g.ids, ifExists, b) }
	} else {
		b := x.addBatch(r, waiters, true)
		r.apply = func() []int64 { return x.w.release(r.seq, g.permits, ifExists, b) }
	}
	reply := x.send(r, f)
	switch {
	case reply == nil:
		x.outcomeUnknown(r)
		return
	case reply[0] < 1:
		c.woken = true
		if !foreign && reply[0] < 0 {
			c.held = append(c.held, g)
		}
		return
	}
	x.apply(r, reply[2:])
	if reply[2] > 0 {
		x.see("served by a release")
	}
	if reply[1] == 0 {
		c.woken = true
	}
}

// confirm retries or undoes a command without a reply.
func (x *walk) confirm(r *command, f fault) {
	c := r.client
	if !r.acquires() {
		reply := x.deliver(r.accepted(r.seq.notAfter, 0), "")
		if len(reply) == 2 && r.seq.notAfter-x.w.now >= cacheTTL { // too early: it has not run yet
			reply = x.deliver(r.accepted(x.w.now+retryTime, 0), "")
		}
		if f != answered {
			return
		} else if len(reply) == 2 { // its permits may never be released
			if !x.permitSem {
				x.total -= r.releases.permits
			}
			r.releases = request{}
		} else if reply[0] >= 1 {
			c.held = append(c.held, r.batch.requests[:reply[2]]...)
		} else if reply[0] < 0 && r.releases.permits > 0 {
			c.held = append(c.held, r.releases)
		}
	} else {
		var args []string
		var permits []int64
		for _, g := range r.batch.requests {
			permits = append(permits, g.permits)
			if x.permitSem {
				args = append(args, g.ids...)
			} else {
				args = append(args, itoa(g.permits))
			}
		}
		u := x.commandAs(x.kindOf("undo"), c, r.seq, args...)
		u.apply = func() []int64 {
			if x.permitSem {
				return x.w.permitUndo(r.seq, args)
			}
			return x.w.undo(r.seq, permits)
		}
		x.sent = append(x.sent, u)
		x.see(u.script, min(1, x.deliver(u, "")[0]))
		r.undone = true
	}
	if f == answered {
		r.unknown = false
		c.done(r.seq)
	}
}

// giveUp removes a request that waits.
func (x *walk) giveUp(c *client, n int) {
	c.waiting = slices.Delete(c.waiting, n, n+1)
	if n > 0 {
		return
	}
	c.woken = true
	if !c.queued {
		return
	}
	c.queued = false
	args := []string{c.id}
	var next *batch
	if len(c.waiting) > 0 && x.w.now-c.waiting[0].began >= bargingMillis {
		c.queued = true
		next = &batch{client: c.id, timeout: c.timeout, requests: []request{x.requestOf(c.waiting[0])}}
		args = append(args, itoa(next.requests[0].waited), itoa(next.timeout))
		x.see("leave", 2)
	}
	r := x.command("leave", c, args...)
	x.run(r, func() []int64 { return x.w.leave(c.id, next) })
}

// run sends a command that only has a reply.
func (x *walk) run(r *command, apply func() []int64) {
	r.apply = apply
	x.send(r, answered)
}

// unsequenced returns a command without a sequence number.
func unsequenced(script string, keys []string, args ...string) *command {
	return &command{script: script, keys: keys, args: args}
}

// pick returns an acquired permit, often one that expires at this moment, or an unknown id.
func (x *walk) pick(which int) string {
	ids := x.w.taken.order()
	for _, id := range ids {
		if x.w.taken.scores[id] == x.w.now && which%2 == 0 {
			return id
		}
	}
	if len(ids) > 0 && which%5 > 0 {
		return ids[which%len(ids)]
	}
	return fmt.Sprintf("unknown permit %d", which%2)
}

// java returns a command of a Java client.
func java(what string, n int64, more ...string) *command {
	return unsequenced("java_"+what, []string{key, wire.PermitTimeouts(key)},
		append([]string{what, wire.SemaphoreChannel(key), itoa(n)}, more...)...)
}

// delta returns a number of permits to add, sometimes just too many.
func (x *walk) delta(s step) int64 {
	switch {
	case s.which%20 == 0:
		return -maxPermits - x.w.free - 1
	case s.which%20 == 1:
		return maxPermits - x.w.free + 1
	case s.which%40 == 2:
		return -maxPermits - x.w.free // the most that can be removed
	}
	if s.which%3 == 0 {
		return -s.n
	}
	return s.n
}

// fault deletes a key, or lets the semaphore expire.
func (x *walk) fault(s step) {
	for _, c := range x.clients {
		c.woken = true
	}
	keys, del := []string{key, wire.PermitTimeouts(key)}, s.Kind == "delete"
	if del {
		all := append(keys, key, wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key), wire.SemaphoreRequests(key, x.clients[s.client].id))
		keys = all[s.which%len(all):][:1]
	} else {
		keys = keys[s.which%3/2:] // or only the acquired permits
	}
	for _, k := range keys {
		cmd := x.conn.B().Del().Key(k).Build()
		if !del {
			cmd = x.conn.B().Pexpire().Key(k).Milliseconds(s.ms + 1).Build()
		}
		lockstep.Check(x.conn.Do(x.ctx, cmd).Error())
		x.w.fault(k, s.ms+1, del)
	}
}

// End implements lockstep.Walk. When nothing is in progress any more, all permits can be
// acquired.
func (x *walk) End() {
	for _, c := range x.clients {
		for len(c.waiting) > 0 {
			x.giveUp(c, 0)
		}
	}
	for _, r := range x.sent {
		if r.unknown {
			x.confirm(r, answered)
		}
	}
	for _, c := range x.clients {
		for _, g := range slices.Clone(c.held) {
			c.held = c.held[1:]
			x.release(c, g, false, false, nil, answered)
		}
	}
	x.compare()
	if x.lossy {
		return
	}
	x.Take(step{Kind: "time passes", which: 1, ms: 3_600_000})
	rest := x.total
	for _, at := range x.w.taken.scores {
		if at == noExpiry {
			rest--
		}
	}
	if rest < 1 || rest > 100 {
		return
	}
	c := x.clients[0]
	x.acquire(c, []*pending{{permits: rest, began: x.w.now}}, false, answered)
	if len(c.held) != 1 {
		lockstep.Failf("%d permits cannot be acquired", rest)
	}
	x.compare()
}
