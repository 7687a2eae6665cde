package semaphore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// grant is what a request asks for and gets.
type grant struct {
	permits int
	// Of an expirable semaphore: the permits, and for how long.
	ids     []string
	lease   time.Duration
	forever bool
}

// request is one wish for permits, from the first attempt on.
type request struct {
	pool     *pool
	began    time.Time
	deadline time.Time // of Wait
	once     bool

	mu       sync.Mutex // others may try for it too
	grant    grant
	served   bool
	sent     time.Time // when the request was sent that it was served by
	attempts int
	waited   bool
	placed   bool // this client is in the line because of it
}

// acquire gets what g asks for. It is called between Enter and Leave of the session.
func (p *pool) acquire(ctx context.Context, g grant, o lock.Options, once bool) (*request, error) {
	if ctx.Err() != nil {
		return nil, errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	r := &request{pool: p, began: time.Now(), grant: g, once: once}
	req := queue.Request{
		Key:      p.queueKey(),
		Acquirer: r,
		Channel:  p.channel,
		Once:     once,
		Eager:    true,
		Shared:   true,
		Group:    true,
		Unheld:   true,
	}
	if o.Bounded && !once {
		r.deadline = r.began.Add(o.Wait)
		req.Deadline = r.deadline
	}
	spanCtx, span := p.s.Telemetry.StartAcquire(ctx, p.described())
	if p.s.Telemetry != nil { // a method value is an allocation
		req.OnWake = span.Woken
	}
	err := p.s.Queues.Acquire(spanCtx, req)
	switch {
	case err != nil:
		r.retire()
	case p.s.Err() != nil:
		r.Abandon()
		err = lock.ErrClosed
	case ctx.Err() != nil: // served in the moment the caller left
		r.Abandon()
		err = errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	r.mu.Lock()
	attempts, waited := r.attempts, r.waited
	r.mu.Unlock()
	span.End(ctx, attempts, waited || attempts == 0, err)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Try implements queue.Acquirer.
func (r *request) Try(ctx context.Context) (queue.Verdict, error) {
	if !r.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.deadline)
		defer cancel()
	}
	result := r.pool.attempt(ctx, []*request{r}, 1, !r.once)[0]
	return result.Verdict, result.Err
}

// TryAll implements queue.Grouped.
func (r *request) TryAll(ctx context.Context, all []queue.Acquirer) []queue.Result {
	// Those who close the client leave it to this request to give back what it gets.
	ctx, cancel := r.pool.s.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	party := requestsOf(all)
	return r.pool.attempt(ctx, party, asking(party, math.MaxInt), true)
}

// Abandon implements queue.Grouped.
func (r *request) Abandon() {
	r.retire()
	r.mu.Lock()
	served, g := r.served, r.grant
	r.mu.Unlock()
	if served {
		r.pool.giveBack([]grant{g})
	}
}

func requestsOf(all []queue.Acquirer) []*request {
	party := make([]*request, len(all))
	for i, a := range all {
		party[i] = a.(*request)
	}
	return party
}

// fewest is for how many requests a release asks, if there are as many: others may have
// given something back, too.
const fewest = 8

// asking returns for how many of a party, from the first on, one attempt is made that
// may find so many permits free. One more than these are enough for is among them: only
// who gets nothing is told when to try again. Together they want no more than one call
// can, unless it is only one of them.
func asking(party []*request, free int) int {
	permits := 0
	for n, r := range party {
		permits += r.grant.permits // which does not change
		switch {
		case r.pool.expirable() && permits > MaxBatch && n > 0:
			return n
		case permits > free && n+1 >= fewest:
			return n + 1
		}
	}
	return len(party)
}

// attempt asks once for the first requests of a party, which wait behind one another if
// waits is set.
func (p *pool) attempt(ctx context.Context, party []*request, asked int, waits bool) []queue.Result {
	rest := make([]queue.Result, len(party)-asked) // they try at once if they are first now
	if err := p.s.Err(); err != nil {
		return append(failed(asked, err), rest...)
	}
	n := p.numbers.next()
	sent := time.Now()
	grants, args := p.asked(party[:asked], sent, waits)
	reply, err := p.exec(ctx, p.scripts.acquire, n, args)
	if err == nil {
		p.numbers.answered(n)
		return p.answered(party, asked, sent, reply)
	}
	outcome := wire.OutcomeOf(err)
	if outcome == wire.Unknown {
		p.doubt(party[:asked])
		p.undo(n, grants)
		err = errors.Join(lock.ErrIndeterminate, err)
	} else {
		p.numbers.answered(n)
	}
	err = fmt.Errorf("redlatch: acquire permits of %q: %w", p.name, err)
	switch {
	case p.s.Err() != nil:
		err = errors.Join(lock.ErrClosed, err)
	case outcome != wire.Refused:
		err = &queue.Unavailable{Err: err}
	}
	return append(failed(asked, err), rest...)
}

func failed(n int, err error) []queue.Result {
	return slices.Repeat([]queue.Result{{Err: err}}, n)
}

// asked returns what a party asks for, and how scripts are told, in a request sent then.
func (p *pool) asked(party []*request, sent time.Time, waits bool) ([]grant, []string) {
	me := ""
	if waits {
		me = p.s.ID
	}
	grants := make([]grant, len(party))
	args := append(make([]string, 0, 4+4*len(party)), me, wire.Millis(overtaking), wire.Millis(p.place()), strconv.Itoa(len(party)))
	for i, r := range party {
		r.mu.Lock()
		if p.expirable() && r.grant.ids == nil {
			r.grant.ids = newIDs(r.grant.permits)
		}
		g := r.grant
		r.mu.Unlock()
		grants[i] = g
		args = append(args, strconv.Itoa(g.permits), strconv.FormatInt(sent.Sub(r.began).Milliseconds(), 10))
		if p.expirable() {
			args = append(args, g.leaseArg())
		}
	}
	for _, g := range grants {
		args = append(args, g.ids...)
	}
	return grants, args
}

func (g *grant) leaseArg() string { return leaseArg(g.lease, g.forever) }

func leaseArg(lease time.Duration, forever bool) string {
	if forever {
		return "forever"
	}
	return wire.Millis(lease)
}

// answered says what the server's answer means for each of a party of which the first
// have asked. reply is how many were served, when trying again may help, and whether the
// next is in the line. If all who asked were served, the others try at once.
func (p *pool) answered(party []*request, asked int, sent time.Time, reply []int64) []queue.Result {
	served, again, placed := int(reply[0]), time.Duration(reply[1])*time.Millisecond, reply[2] == 1
	results := make([]queue.Result, len(party))
	var late []grant
	for i, r := range party {
		r.mu.Lock()
		if i < asked {
			r.attempts++
		}
		switch {
		case i < served && p.expirable() && !r.grant.forever && time.Since(sent) >= r.grant.lease:
			// The lease was over before its confirmation came.
			late = append(late, r.grant)
			r.grant.ids = nil
		case i < served:
			r.served, r.sent, r.placed = true, sent, false
			results[i].Acquired = true
		case served == asked:
			r.waited = true
		default:
			r.waited = true
			r.placed = placed && i == served
			results[i].FreeIn = p.lookAgain(again, r, sent)
		}
		r.mu.Unlock()
	}
	if len(late) > 0 {
		p.giveBack(late)
	}
	return results
}

// lookAgain is after what time a request that was not served, by an attempt sent then,
// tries again without a message. r.mu is held.
func (p *pool) lookAgain(again time.Duration, r *request, sent time.Time) time.Duration {
	pause := time.Duration(-1)
	switch {
	case r.placed:
		pause = p.place() / 3 // and shows a sign of life
	case sent.Sub(r.began) < overtaking: // else there are no permits at all
		pause = max(0, overtaking-time.Since(r.began)) // then it may go into the line
	}
	if again >= 0 && (pause < 0 || again < pause) {
		pause = again
	}
	return pause
}

// doubt is called when nothing is known of an attempt for a party. What it may have
// got is undone, so they go on with other permits. A place in line that it may have
// got is that of the first of them.
func (p *pool) doubt(party []*request) {
	for i, r := range party {
		r.mu.Lock()
		r.attempts++
		r.grant.ids = nil
		if i == 0 && !r.once && time.Since(r.began) >= overtaking {
			r.placed = true
		}
		r.mu.Unlock()
	}
}

// undo calls off, in the background, an acquisition with an unknown outcome.
func (p *pool) undo(n number, grants []grant) {
	var args []string
	for _, g := range grants {
		if p.expirable() {
			args = append(args, g.ids...)
		} else {
			args = append(args, strconv.Itoa(g.permits))
		}
	}
	// A server that stands still may run the acquisition when it goes on: to call it off
	// then is as good as ever.
	n.until = time.Now().Add(undoTime)
	p.settle(func(ctx context.Context, patience time.Duration) {
		if patience > 0 {
			patience = undoTime
		}
		_, _, _ = p.callAs(ctx, n, patience, p.scripts.undo, args)
	})
}

// giveBack releases, in the background, what nobody waits for any more. Whoever has
// deleted the semaphore meanwhile does not want it back.
func (p *pool) giveBack(grants []grant) {
	p.settle(func(ctx context.Context, patience time.Duration) {
		for _, g := range grants {
			_, _ = p.release(ctx, patience, g, true)
		}
	})
}

// retire gives up what a wait that has ended may have left on the server.
func (r *request) retire() {
	r.mu.Lock()
	placed := r.placed
	r.placed = false
	r.mu.Unlock()
	if placed {
		r.pool.settle(func(ctx context.Context, patience time.Duration) {
			p := r.pool
			n := p.numbers.next()
			_, _, _ = p.callAs(ctx, n, patience, leaveScript, []string{p.s.ID})
			// The place was that of all requests of this client: the next wants one.
			p.s.Queues.Wake(p.queueKey())
		})
	}
}

// The results of a release.
const (
	releaseTooMany = -1
	releaseAbsent  = 0
	releaseDone    = 1
)

// release gives permits back and serves those of this process who wait, in one
// request if it can. It returns what became of it, and tries for as long as patience
// says; then the background does.
func (p *pool) release(ctx context.Context, patience time.Duration, g grant, ifExists bool) (int64, error) {
	own := g.ids
	if !p.expirable() {
		own = []string{wire.Flag(ifExists)}
	}
	own = append([]string{strconv.Itoa(g.permits)}, own...)
	n := p.numbers.next()
	var reply []int64
	var outcome wire.Outcome
	var err error
	offered := p.s.Queues.Offer(p.queueKey(), func(all []queue.Acquirer) []queue.Result {
		party := requestsOf(all)
		asked := asking(party, g.permits)
		sent := time.Now() // of the first try: later ones may find it done
		grants, args := p.asked(party[:asked], sent, true)
		args = append(slices.Clip(own), args...)
		reply, outcome, err = p.callAs(ctx, n, patience, p.scripts.release, args)
		switch {
		case err == nil && reply[0] == releaseDone:
			p.s.Telemetry.HandedOver(ctx, p.described(), int(reply[2]))
			return p.answered(party, asked, sent, reply[2:])
		case err == nil:
			return make([]queue.Result, len(all)) // they try themselves
		case outcome != wire.Refused:
			p.doubt(party[:asked])
			p.finish(n, args, grants)
		}
		return failed(len(all), &queue.Unavailable{Err: fmt.Errorf("redlatch: acquire permits of %q: %w", p.name, err)})
	})
	if !offered {
		_, args := p.asked(nil, time.Time{}, true)
		args = append(own, args...)
		reply, outcome, err = p.callAs(ctx, n, patience, p.scripts.release, args)
		if err != nil && outcome != wire.Refused {
			p.finish(n, args, nil)
		}
	}
	switch {
	case err != nil && outcome != wire.Refused:
		return 0, errors.Join(lock.ErrIndeterminate, err) // the background may do it yet
	case err != nil:
		return 0, err
	}
	if !offered && reply[0] == releaseDone && reply[1] == 0 {
		// Nobody has heard of it: those of this process, if any, must not wait for that.
		p.s.Queues.Wake(p.queueKey())
	}
	return reply[0], nil
}

// finish goes on with a release in the background. What it gets for others in the
// same request comes too late for them.
func (p *pool) finish(n number, args []string, grants []grant) {
	p.settle(func(ctx context.Context, patience time.Duration) {
		reply, _, err := p.callAs(ctx, n, patience, p.scripts.release, args)
		if err == nil && reply[0] == releaseDone && int(reply[2]) > 0 {
			p.giveBack(grants[:reply[2]])
		}
	})
}
