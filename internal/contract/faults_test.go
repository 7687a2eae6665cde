package contract_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// step is a request, and what sends it.
type step struct {
	name   string
	script string
	// run has the fault happen to the request, and checks what holds then.
	run func(x *faultCase)
}

// faultCase is a case of TestEveryFaultOfEveryRequest.
type faultCase struct {
	site
	fault  harness.Fault
	script string // whose request the fault happens to
	sha    string
	// after is called when the client has come to rest, if it is set.
	after  func(t *testing.T)
	failed bool
}

// faultTable has a row for each kind that sends requests of its own.
var faultTable = []requests{
	lockRow,
	requestsOf("fenced", requests{ // no more than what a token comes with
		acquire: lockRow.acquire, handOff: "rlock/confirm_fenced", transfer: "rlock/transfer", there: lockRow.there, here: lockRow.here,
	}),
	plainRow, fairRow, electionRow, readRow, writeRow, severalRow, permitRow, numberRow,
	requestsOf("latch", requests{steps: latchSteps}),
}

var (
	lockRow = requestsOf("lock", requests{
		acquire: "rlock/acquire", release: "rlock/release",
		handOff: hashExtend, renew: hashRenew, extend: hashExtend, transfer: "rlock/transfer",
		there: 2, here: 1,
	})
	readRow = requestsOf("read", requests{
		acquire: "rwlock/acquire_read", release: "rwlock/release_read",
		handOff: "rwlock/release_write", renew: "rwlock/renew_read", extend: "rwlock/extend", transfer: "rwlock/transfer",
		there: 2, here: 2, steps: readSteps,
	})
	writeRow = requestsOf("write", requests{
		acquire: "rwlock/acquire_write", release: "rwlock/release_write",
		handOff: "rwlock/extend", renew: hashRenew, extend: "rwlock/extend", transfer: "rwlock/transfer",
		held: reading, there: 2, here: 2, steps: writeSteps,
	})
	permitRow = requestsOf("permit semaphore", requests{
		acquire: "semaphore/permit_acquire", release: "semaphore/fast_permit_release",
		handOff: "semaphore/permit_release", renew: "semaphore/permit_renew", extend: "semaphore/permit_extend",
		transfer: "semaphore/permit_transfer",
		there:    3, here: 3, numbered: true, steps: slices.Concat(permitSteps(true), leasedPermitSteps),
	})
	numberRow = requestsOf("semaphore", requests{
		acquire: "semaphore/acquire", release: "semaphore/fast_release", handOff: "semaphore/release",
		there: 3, here: 3, numbered: true, steps: permitSteps(false),
	})
)

var plainRow = func() requests {
	r := requestsOf("plain", requests{
		acquire: "rlock/plain_acquire", release: "rlock/plain_release", handOff: "rlock/plain_extend",
		renew: "rlock/plain_renew", extend: "rlock/plain_extend", transfer: "rlock/plain_transfer",
		there: 2, here: 1,
	})
	r.of, r.rival, r.held = quietly, quietly, quietly
	return r
}()

// common returns the steps of all kinds.
func (r requests) common() []step {
	all := []step{
		{"try", r.acquire, (*faultCase).try},
		{"wait", r.acquire, func(x *faultCase) { x.wait(1) }},
		{"hand-off", r.handOff, func(x *faultCase) { x.passOn(x.rival, 1) }},
		{"release", r.release, (*faultCase).unlock},
		{"renewal", r.renew, (*faultCase).renewal},
		{"extension", r.extend, (*faultCase).extension},
		{"detachment", r.transfer, (*faultCase).detachment},
		{"adoption", r.transfer, (*faultCase).adoption},
	}
	if r.shared {
		all = append(all, step{"wait together", r.acquire, func(x *faultCase) { x.wait(3) }},
			step{"hand-off to several", r.handOff, func(x *faultCase) { x.passOn(x.rival, 3) }})
	}
	return all
}

// casesAtATime is how many cases of a row run at the same time.
const casesAtATime = 14

// drawn has the first tier run a third of the cases of the large tables, others each time.
func drawn() bool { return rand.IntN(harness.Size(3, 1)) == 0 }

// TestEveryFaultOfEveryRequest has everything happen to every request of every kind that
// can happen to it. The caller hears what is known, nobody holds what it does not know of,
// and in the end nothing is left.
func TestEveryFaultOfEveryRequest(t *testing.T) {
	harness.EachOf(t, faultTable, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		scene := newScene(t, s, r.timeout)
		var cases []*faultCase
		batch := newBatch(t, casesAtATime)
		for _, step := range slices.Concat(r.common(), r.steps) {
			if step.script == "" {
				continue
			}
			for _, fault := range harness.Faults {
				if !drawn() {
					continue
				}
				x := &faultCase{fault: fault, site: site{requests: r, scene: scene}}
				x.name = fmt.Sprintf("%s, %v", step.name, fault)
				cases = append(cases, x)
				batch.run(x.name, func(t *testing.T) {
					defer func() { x.failed = t.Failed() }()
					x.T, x.impatient = t, x.fault == harness.Silence
					x.prepare()
					x.script, x.sha = step.script, x.load(x, step.script)
					step.run(x)
				})
			}
		}
		batch.running.Wait()
		var sites []*site
		var names []string
		for _, x := range cases {
			if x.T == nil || x.failed {
				continue // it was not asked for, or the server may have anything
			}
			sites, names = append(sites, &x.site), append(names, x.name)
		}
		idle(t, sites)
		for _, x := range cases {
			if x.after != nil && !x.failed {
				x.after(t)
			}
		}
		for _, x := range sites {
			for _, c := range []*redlatch.Client{x.other, x.c} {
				h, err := r.rival(c, x.name).TryLock(t.Context())
				require.NoError(t, err, "not free: %s", x.name)
				require.NoError(t, h.Unlock(t.Context()), x.name)
			}
		}
		renewNothing(t, sites)
		if !t.Failed() {
			r.unmake(t, s.Addr, names...)
			harness.NothingStays(t, s.Addr)
		}
	})
}

// during has the fault happen to a request of the operation.
func (x *faultCase) during(operation func()) {
	x.Helper()
	x.g.During(x, x.fault, x.sha, operation)
}

// reports fails the test unless a request that nothing is known of was reported as such.
func (x *faultCase) reports(err error) {
	x.Helper()
	if !x.fault.Unknown() {
		require.NoError(x, err)
		return
	}
	require.ErrorIs(x, err, lock.ErrIndeterminate)
	require.NotErrorIs(x, err, lock.ErrNotAcquired)
}

// try makes one attempt. What it may have got is given back well before its lease is over.
func (x *faultCase) try() {
	var h lock.Hold
	var err error
	x.during(func() { h, err = x.mine().TryLock(x.ctx, x.forever()...) })
	x.reports(err)
	x.open()
	if err == nil {
		x.released(h)
	}
}

// wait has waiters acquire when a holder elsewhere releases.
func (x *faultCase) wait(n int) {
	theirs := mustLock(x, x.Context(), x.held(x.other, x.name), x.forever()...)
	waiters := x.line(x.there, n)
	last := x.behind()
	x.during(func() { require.NoError(x, theirs.Unlock(x.Context())) })
	if last == nil {
		x.open()
		x.getIn(waiters...)
		return
	}
	require.True(x, last.Running(), "one has overtaken another")
	x.open()
	x.getIn(waiters...)
	harness.InOrder(x, last)
}

// behind returns a waiter elsewhere behind all others, if the kind keeps them in order.
func (x *faultCase) behind() *call {
	x.Helper()
	if !x.ordered {
		return nil
	}
	n := len(x.queue())
	w := harness.StartLock(x, x.Context(), x.theirs())
	harness.Eventually(x, soon, "it has a place", func() bool { return len(x.queue()) == n+1 })
	w.Owner = x.queue()[n]
	return w
}

// passOn has a holder pass on what it has to waiters of its client.
func (x *faultCase) passOn(held lockOf, n int) {
	h := mustLock(x, x.ctx, held(x.c, x.name), x.forever()...)
	waiters := x.line(x.here, n)
	last := x.behind()
	var err error
	x.during(func() { err = h.Unlock(x.ctx) })
	x.ended(err)
	x.open()
	x.getIn(waiters...)
	if last != nil {
		harness.InOrder(x, last)
	}
}

// line returns waiters, of which the first is parked after so many attempts.
func (x *faultCase) line(attempts, n int) []*call {
	x.Helper()
	all := []*call{x.parked(attempts, x.forever()...)}
	for range n - 1 {
		all = append(all, x.joined(x.forever()...))
	}
	return all
}

// getIn checks that waiters get in, together if there are several.
func (x *faultCase) getIn(waiters ...*call) {
	x.Helper()
	var holds []lock.Hold
	for _, w := range waiters {
		holds = append(holds, w.Got())
	}
	x.released(holds...)
}

// ended checks the error of an Unlock. All that the client learns from a release that was sent
// twice is that it does not hold the lock, and from one that has run without a reply, not even
// whether it did before.
func (x *faultCase) ended(err error) {
	x.Helper()
	switch release := strings.Contains(x.script, "release") && !x.numbered; {
	case release && x.fault == harness.Resend:
		require.ErrorIs(x, err, lock.ErrLost)
	case release && (x.fault == harness.LoseReply || x.fault == harness.Silence):
		require.ErrorIs(x, err, lock.ErrIndeterminate)
		require.NotErrorIs(x, err, lock.ErrLost)
	default:
		require.NoError(x, err)
	}
}

func (x *faultCase) unlock() {
	h := mustLock(x, x.ctx, x.mine())
	last := x.behind()
	var err error
	x.during(func() { err = h.Unlock(x.ctx) })
	x.ended(err)
	x.open()
	if last != nil {
		require.NoError(x, last.EndWithin(4*time.Second), "before any poll")
		harness.InOrder(x, last)
	}
}

func (x *faultCase) renewal() {
	h := mustLock(x, x.ctx, x.mine())
	first := time.Now().Add(h.Remaining())
	x.during(func() {
		harness.Eventually(x, x.timeout, "the lease is renewed", func() bool {
			return time.Now().Add(h.Remaining()).After(first.Add(x.timeout / 4))
		})
	})
	x.open()
	x.released(h)
}

func (x *faultCase) extension() {
	h := mustLock(x, x.ctx, x.mine(), lock.Lease(30*time.Second))
	var err error
	x.during(func() { err = h.Extend(x.ctx, time.Minute) })
	x.open()
	if x.fault.Unknown() {
		require.Error(x, err)
		require.NotErrorIs(x, err, lock.ErrLost)
		require.NotErrorIs(x, err, lock.ErrNotHeld)
		x.exactly(h)
		err = h.Extend(x.ctx, time.Minute)
	}
	require.NoError(x, err)
	require.Greater(x, h.Remaining(), 40*time.Second)
	x.released(h)
}

func (x *faultCase) detachment() {
	h := mustLock(x, x.ctx, x.mine())
	var id string
	var err error
	x.during(func() { id, err = h.Detach(x.ctx, time.Hour) })
	require.NoError(x, err)
	x.open()
	require.ErrorIs(x, h.Unlock(x.ctx), lock.ErrNotHeld)
	isTaken(x, x.theirs())
	adopted, err := x.of(x.other, x.name).(adopter).Adopt(x.ctx, id)
	require.NoError(x, err)
	x.released(adopted)
}

func (x *faultCase) adoption() {
	id, err := mustLock(x, x.ctx, x.of(x.other, x.name)).Detach(x.ctx, time.Hour)
	require.NoError(x, err)
	var h lock.Hold
	x.during(func() { h, err = x.mine().(adopter).Adopt(x.ctx, id) })
	require.NoError(x, err)
	x.open()
	x.released(h)
}

// released checks that these are all holds there are, and gives them back.
func (x *faultCase) released(holds ...lock.Hold) {
	x.Helper()
	x.exactly(holds...)
	for _, h := range holds {
		require.NoError(x, h.Unlock(x.ctx))
	}
}

// exactly checks that the object has these holds in the end, and no others, and that none
// is more certain of its lease than the server.
func (x *faultCase) exactly(holds ...lock.Hold) {
	x.Helper()
	isTaken(x, x.theirs())
	for _, h := range holds {
		require.NotNil(x, h)
		require.NoError(x, h.Context().Err())
		if x.owned {
			x.owns(h, len(holds))
		}
		if p, ok := h.(permitHold); ok {
			asked, remaining := time.Now(), p.Remaining()
			left, err := x.other.PermitSemaphore(x.name).LeaseTime(x.ctx, p.ID())
			require.NoError(x, err)
			// Both have come down meanwhile, and have the same clock.
			require.LessOrEqual(x, remaining, left+time.Since(asked)+10*time.Millisecond)
			require.Positive(x, remaining)
		}
	}
}

// owns checks that an owner has one hold of n.
func (x *faultCase) owns(h lock.Hold, n int) {
	x.Helper()
	seen := x.lock(x.other, x.name)
	keys := []string{x.name}
	switch x.kind.name {
	case "read":
		keys = append(keys, wire.ReadHoldTimeout(x.name, h.Owner().String(), 1))
		n++ // the mode
	case "write":
		n++
	}
	harness.Eventually(x, soon, "these holds are there, each once", func() bool {
		return harness.HoldCount(x, seen, h.Owner()) == 1 &&
			(x.kind.name == "plain" || x.number(x, "HLEN", x.name) == int64(n))
	})
	x.certain(h, keys...)
	if x.kind.name == "fenced" {
		require.Positive(x, h.Token())
		require.LessOrEqual(x, h.Token(), x.number(x, "GET", wire.FencingToken(x.name)), "some tokens are not used")
	}
}

// certain checks that a hold is no more certain of its lease than the server.
func (x *faultCase) certain(h lock.Hold, keys ...string) {
	x.Helper()
	for _, key := range keys {
		ttl := time.Duration(x.number(x, "PTTL", key)) * time.Millisecond
		require.LessOrEqual(x, h.Remaining(), ttl+time.Millisecond, key)
	}
}

// readSteps are what only readers send.
var readSteps = []step{
	{"downgrade", "rwlock/release_write", func(x *faultCase) {
		ctx := lock.WithOwner(x.ctx, x.c.NewOwner())
		w := mustLock(x, ctx, writing(x.c, x.name))
		r := mustLock(x, ctx, x.mine())
		var err error
		x.during(func() { err = w.Unlock(x.ctx) })
		x.ended(err)
		x.open()
		x.exactly(r)
		require.NoError(x, x.of(x.other, x.name).Do(x.Context(), nothing, lock.Wait(2*time.Second)))
		x.released(r)
	}},
}

// writeSteps are what only writers send.
var writeSteps = []step{
	{"release of a reader", "rwlock/release_read", func(x *faultCase) { x.passOn(reading, 1) }},
	{"release of one of several readers", "rwlock/release_read", func(x *faultCase) {
		theirs := mustLock(x, x.Context(), reading(x.other, x.name))
		h := mustLock(x, x.ctx, reading(x.c, x.name))
		waiter := x.line(x.here, 1)
		var err error
		x.during(func() { err = h.Unlock(x.ctx) })
		x.ended(err)
		x.open()
		require.NoError(x, theirs.Context().Err())
		require.True(x, waiter[0].Running())
		require.NoError(x, theirs.Unlock(x.Context()))
		x.getIn(waiter...)
	}},
	{"a writer leaves", "rwlock/leave", func(x *faultCase) {
		theirs := mustLock(x, x.Context(), reading(x.other, x.name))
		w := x.line(x.there, 1)[0]
		x.during(func() {
			w.Cancel(nil)
			harness.NotAcquired(x, w.End())
		})
		x.open()
		// Well before the sign of one that died would go.
		require.NoError(x, reading(x.other, x.name).Do(x.Context(), nothing, lock.Wait(3*time.Second)))
		require.Zero(x, x.number(x, "EXISTS", wire.WriterWaits(x.name)))
		require.NoError(x, theirs.Unlock(x.Context()))
	}},
}

// severalRow is a lock of several locks that one script takes and releases.
var severalRow = func() requests {
	names := func(name string) []string { return []string{name, name + " 2", name + " 3"} }
	several := func(c *redlatch.Client, name string) lock.Locker {
		var members []lock.Locker
		for _, name := range names(name) {
			members = append(members, c.Lock(name))
		}
		return c.MultiLock(members...)
	}
	// all checks that a hold has every lock, and gives them back.
	all := func(x *faultCase, h lock.Hold) {
		x.Helper()
		for _, name := range names(x.name) {
			isTaken(x, x.other.Lock(name))
			require.EqualValues(x, 1, x.number(x, "HLEN", name))
		}
		x.certain(h, names(x.name)...)
		x.released(h)
	}
	r := requestsOf("multi", requests{
		acquire: "rlock/acquire_each", release: "rlock/release_each",
		steps: []step{
			{"lock", "rlock/acquire_each", func(x *faultCase) {
				var h lock.Hold
				var err error
				x.during(func() { h, err = x.mine().Lock(x.ctx, x.forever()...) })
				require.NoError(x, err)
				x.open()
				all(x, h)
			}},
			{"lock the rest", "rlock/acquire_each", func(x *faultCase) {
				theirs := mustLock(x, x.Context(), x.other.Lock(x.name))
				var w *call
				x.g.Keep(x, x.load(x, "rlock/acquire"), 1, func() { w = harness.StartLock(x, x.ctx, x.mine(), x.forever()...) })
				x.open()
				x.during(func() { require.NoError(x, theirs.Unlock(x.Context())); <-w.Ended })
				x.open()
				all(x, w.Got())
			}},
			{"the end of a lease", hashRenew, func(x *faultCase) {
				theirs := mustLock(x, x.Context(), x.other.Lock(names(x.name)[2]), lock.Lease(200*time.Millisecond))
				var h lock.Hold
				var err error
				x.during(func() { h, err = x.mine().Lock(x.ctx, lock.Lease(10*time.Second)) })
				x.open()
				if x.fault.Unknown() {
					require.Error(x, err)
					require.NotErrorIs(x, err, lock.ErrLost)
				} else {
					require.NoError(x, err)
					all(x, h)
				}
				require.ErrorIs(x, theirs.Unlock(x.Context()), lock.ErrLost)
			}},
		},
	})
	r.of, r.rival = several, several
	return r
}()
