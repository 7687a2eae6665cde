package robustness

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// tale builds a history. Times are small numbers. Each claim has an owner of its own unless as
// names one.
type tale []event

func (s tale) calls(claim string, at int64) tale {
	return append(s, event{What: locking, At: at, Claim: claim, Lock: "orders"})
}

// as gives the latest claim a named owner.
func (s tale) as(owner string) tale {
	s[len(s)-1].Owner, s[len(s)-1].Named = owner, true
	return s
}

// of gives the latest claim a kind, and another lock besides orders.
func (s tale) of(kind string, more ...string) tale {
	e := &s[len(s)-1]
	e.Kind, e.Lock = kind, strings.Join(append(more, e.Lock), ",")
	return s
}

// queues notes that a claim has a queue position.
func (s tale) queues(claim string, at int64) tale {
	return append(s, event{What: queued, At: at, Claim: claim})
}

// gets ends the call of a claim, whose lease then lasts until certain.
func (s tale) gets(claim string, at, certain int64) tale {
	s = append(s, event{What: locked, At: at, Claim: claim})
	if certain == 0 {
		return s
	}
	return append(s, event{What: seen, At: at, Claim: claim, Until: certain})
}

// token gives the latest claim that acquired the lock a fencing token.
func (s tale) token(n int64) tale {
	for i := len(s) - 1; ; i-- {
		if s[i].What == locked {
			s[i].Token = n
			return s
		}
	}
}

func (s tale) sees(claim string, at, certain int64) tale {
	return append(s, event{What: seen, At: at, Claim: claim, Until: certain})
}

func (s tale) fails(claim string, at int64, o outcome) tale {
	return append(s, event{What: notLocked, At: at, Claim: claim, Outcome: o})
}

func (s tale) unlocks(claim string, at int64) tale {
	return append(s, event{What: unlocking, At: at, Claim: claim})
}

func (s tale) unlocked(claim string, at int64, o outcome) tale {
	return append(s, event{What: unlocked, At: at, Claim: claim, Outcome: o})
}

// lost ends an Unlock with a loss that was noticed at when.
func (s tale) lost(claim string, at int64, o outcome, when int64) tale {
	return append(s, event{What: unlocked, At: at, Claim: claim, Outcome: o, Lost: when})
}

func (s tale) wiped(from, to int64, lock string) tale {
	return append(s, event{What: wiped, At: from, Until: to, Lock: lock})
}

// TestHistories has all that is common. These histories are rare, or wrong.
func TestModel(t *testing.T) {
	for want, tales := range map[porcupine.CheckResult]map[string]tale{porcupine.Ok: {
		"the lease expired unobserved after its renewal": tale{}.
			calls("a", 1).gets("a", 2, 20).sees("a", 10, 30).calls("b", 3).gets("b", 31, 100).
			unlocks("a", 40).lost("a", 41, expired, 35),
		"the server says that an expired hold is gone": tale{}.
			calls("a", 1).gets("a", 2, 20).calls("b", 3).gets("b", 21, 100).
			unlocks("a", 10).lost("a", 30, gone, 25),
		"expired before it could be observed": tale{}.
			calls("a", 1).gets("a", 2, 0).calls("b", 3).gets("b", 4, 100),
		"the lock was deleted": tale{}.
			calls("a", 1).gets("a", 2, 100).wiped(5, 7, "orders").calls("b", 3).gets("b", 6, 100).
			unlocks("a", 8).lost("a", 9, gone, 9),
		"a wipe of a free lock": tale{}.
			calls("a", 1).wiped(2, 3, "").gets("a", 4, 100).unlocks("a", 5).unlocked("a", 6, fine),
		"a release with an unknown outcome": tale{}.
			calls("a", 1).gets("a", 2, 100).unlocks("a", 3).unlocked("a", 4, unknown).calls("b", 5).gets("b", 6, 100),
		"killed in Unlock": tale{}.
			calls("a", 1).gets("a", 2, 100).unlocks("a", 3).calls("b", 4).gets("b", 5, 100),
		"re-entry outlives the first lease": tale{}.
			calls("a1", 1).as("A").gets("a1", 2, 20).calls("a2", 3).as("A").gets("a2", 4, 50).
			calls("b", 5).unlocks("a1", 30).lost("a1", 31, expired, 20).gets("b", 51, 100).
			unlocks("a2", 60).lost("a2", 61, expired, 50),
		"re-entry of a hold that was wiped": tale{}.
			calls("a1", 1).as("A").gets("a1", 2, 100).wiped(3, 4, "").calls("b", 5).gets("b", 6, 100).
			calls("a2", 7).as("A").gets("a2", 8, 100).unlocks("a2", 9).lost("a2", 10, gone, 10),
		"a hold on several locks, one of which was deleted": tale{}.
			calls("a", 1).of("multi", "others").gets("a", 2, 100).wiped(3, 4, "others").
			unlocks("a", 5).lost("a", 6, gone, 6).calls("b", 7).gets("b", 8, 100),
		"permits of a semaphore that was created again": tale{}.
			calls("a", 1).of("counting").gets("a", 2, 100).wiped(3, 4, "").unlocks("a", 5).unlocked("a", 6, fine).
			calls("b", 7).of("counting").gets("b", 8, 100).calls("c", 7).of("counting").gets("c", 8, 100).
			calls("d", 7).of("counting").gets("d", 8, 100).calls("e", 7).of("counting").gets("e", 8, 100),
		"passed on after the wipe, by a process that had it before": tale{}.
			calls("a#1", 1).gets("a#1", 2, 100).wiped(3, 4, "").calls("a#2", 5).unlocks("a#1", 6).gets("a#2", 7, 100).
			unlocks("a#2", 8).unlocked("a#1", 9, fine).lost("a#2", 10, gone, 10),
		"tokens restart without their counter": tale{}.
			calls("a", 1).gets("a", 2, 20).token(3).wiped(3, 4, "").
			calls("b", 5).gets("b", 6, 100).token(1),
	}, porcupine.Illegal: {
		"two certain holders, one learns of its loss later": tale{}.
			calls("a", 1).gets("a", 2, 20).calls("b", 3).gets("b", 10, 100).unlocks("a", 30).lost("a", 31, gone, 31),
		"a renewed lease is certain": tale{}.
			calls("a", 1).gets("a", 2, 20).sees("a", 10, 30).calls("b", 3).gets("b", 25, 100),
		"acquired before its holder was killed": tale{}.
			calls("a", 1).gets("a", 2, 50).calls("b", 3).gets("b", 4, 100),
		"removed by the release of another owner": tale{}.
			calls("a", 1).gets("a", 2, 20).unlocks("a", 30).lost("a", 31, expired, 20).
			calls("b", 21).gets("b", 22, 100).unlocks("b", 32).lost("b", 33, gone, 33),
		"gone though another lock was deleted": tale{}.
			calls("a", 1).gets("a", 2, 100).wiped(3, 4, "others").unlocks("a", 5).lost("a", 6, gone, 6),
		"gone though the wipe came first": tale{}.
			wiped(1, 2, "").calls("a", 3).gets("a", 4, 100).unlocks("a", 5).lost("a", 6, gone, 6),
		"two holders after a wipe": tale{}.
			calls("a", 1).gets("a", 2, 100).wiped(3, 4, "").
			calls("b", 5).gets("b", 6, 100).calls("c", 5).gets("c", 7, 100),
		"another owner re-enters": tale{}.
			calls("a", 1).as("A").gets("a", 2, 100).calls("b", 3).as("B").gets("b", 4, 100),
		"the first of two releases frees the lock": tale{}.
			calls("a1", 1).as("A").gets("a1", 2, 100).calls("a2", 3).as("A").gets("a2", 4, 100).
			unlocks("a1", 5).unlocked("a1", 6, fine).calls("b", 7).gets("b", 8, 100),
		"an acquisition without a promise must still be legal": tale{}.
			calls("a", 1).gets("a", 2, 100).calls("b", 3).gets("b", 4, 0),
		"a hold on several locks keeps the one that was not deleted": tale{}.
			calls("a", 1).of("multi", "others").gets("a", 2, 100).wiped(3, 4, "others").
			calls("b", 5).gets("b", 6, 100).unlocks("a", 7).lost("a", 8, gone, 8),
		"an earlier token of the same owner": tale{}.
			calls("a1", 1).as("A").gets("a1", 2, 100).token(3).unlocks("a1", 3).unlocked("a1", 4, fine).
			calls("a2", 5).as("A").gets("a2", 6, 100).token(2),
		"tokens restart though only the lock was deleted": tale{}.
			calls("a", 1).gets("a", 2, 20).token(3).wiped(3, 4, "orders").
			calls("b", 5).gets("b", 6, 100).token(1),
	}} {
		for name, s := range tales {
			ops := newHistory(s).partition("orders")
			assert.Equal(t, want, porcupine.CheckOperationsTimeout(model, ops, checkTimeout), name)
		}
	}
}

// runs adds a run of the slot from called to its end; it begins work at began, and the lease lasts
// until certain.
func (s tale) runs(claim string, called, began, certain int64) tale {
	s = append(s, event{What: locking, At: called, Claim: claim, Lock: "slot", Kind: slotKind, Wait: time.Hour})
	return append(s, event{What: locked, At: began, Claim: claim}, event{What: seen, At: began, Claim: claim, Until: certain})
}

// ends ends the work of a claim, and its Run if returned is not 0. The work has succeeded if Run
// remembers it.
func (s tale) ends(claim string, at, returned int64, o outcome, remembered bool) tale {
	worked := event{What: unlocking, At: at, Claim: claim, Outcome: failed}
	if remembered || returned == 0 {
		worked.Outcome = fine
	}
	s = append(s, worked)
	if returned == 0 {
		return s
	}
	return append(s, event{What: unlocked, At: returned, Claim: claim, Outcome: o, Lost: at, Remembered: remembered})
}

// skips adds a Run that finds the work done.
func (s tale) skips(claim string, called, returned int64) tale {
	s = append(s, event{What: locking, At: called, Claim: claim, Lock: "slot", Kind: slotKind, Wait: time.Hour})
	return append(s, event{What: notLocked, At: returned, Claim: claim, Outcome: skipped})
}

func TestSlotChecks(t *testing.T) {
	succeeded := tale{}.runs("a", 1, 2, 100).ends("a", 5, 8, fine, true)
	for name, c := range map[string]struct {
		tale  tale
		wrong string // a part of the only violation, or ""
	}{
		"done once":                            {succeeded, ""},
		"done by another":                      {slices.Concat(succeeded, tale{}.skips("b", 9, 10)), ""},
		"done while it waits":                  {slices.Concat(succeeded, tale{}.skips("b", 3, 10)), ""},
		"done by a process that was killed":    {slices.Concat(tale{}.runs("a", 1, 2, 100).ends("a", 5, 0, "", true), tale{}.skips("b", 6, 7)), ""},
		"again after a failure":                {slices.Concat(tale{}.runs("a", 1, 2, 100).ends("a", 5, 8, failed, false), tale{}.runs("b", 3, 9, 100)), ""},
		"again after a crash":                  {slices.Concat(tale{}.runs("a", 1, 2, 20), tale{}.runs("b", 3, 21, 100)), ""},
		"again after a success that was lost":  {slices.Concat(succeeded, tale{}.wiped(9, 10, ""), tale{}.runs("b", 11, 12, 100)), ""},
		"lost while it was stored":             {slices.Concat(succeeded, tale{}.wiped(6, 7, ""), tale{}.runs("b", 9, 10, 100)), ""},
		"succeeds late, without its lock":      {slices.Concat(tale{}.runs("a", 1, 2, 20).ends("a", 50, 51, expired, true), tale{}.runs("b", 3, 52, 100)), ""},
		"stopped before it began":              {slices.Concat(succeeded, tale{}.runs("b", 3, 9, 0)), ""},
		"again after a success":                {slices.Concat(succeeded, tale{}.runs("b", 3, 9, 100)), "ran after"},
		"again after a success long ago":       {slices.Concat(tale{}.wiped(1, 2, ""), tale{}.runs("a", 3, 4, 100).ends("a", 5, 8, fine, true), tale{}.runs("b", 9, 10, 100)), "ran after"},
		"again after a success without a lock": {slices.Concat(tale{}.runs("a", 1, 2, 20).ends("a", 50, 51, expired, true), tale{}.runs("b", 52, 53, 100)), "ran after"},
		"two at a time":                        {slices.Concat(tale{}.runs("a", 1, 2, 100), tale{}.runs("b", 3, 4, 100)), "Illegal"},
		"done before anything ran":             {tale{}.skips("b", 9, 10), "done before"},
		"done before its work ended":           {slices.Concat(tale{}.runs("a", 1, 2, 100).ends("a", 11, 12, fine, true), tale{}.skips("b", 9, 10)), "done before"},
		"done though it failed":                {slices.Concat(tale{}.runs("a", 1, 2, 100).ends("a", 5, 8, failed, false), tale{}.skips("b", 9, 10)), "done before"},
		"ran and did not":                      {append(tale{}.runs("a", 1, 2, 100).ends("a", 5, 0, "", true), event{What: notLocked, At: 8, Claim: "a", Outcome: refused}), "returned false"},
	} {
		wrongs := newHistory(c.tale).check(t.TempDir(), checkTimeout)
		if c.wrong == "" {
			assert.Empty(t, wrongs, name)
			continue
		}
		if assert.Len(t, wrongs, 1, name) {
			assert.Contains(t, wrongs[0], c.wrong, name)
		}
	}
}

func TestCheckReports(t *testing.T) {
	for what, s := range map[string]tale{
		"Illegal":          tale{}.calls("a", 1).gets("a", 2, 100).calls("b", 3).gets("b", 4, 100),
		"took":             tale{}.calls("a", 1).fails("a", time.Minute.Nanoseconds(), refused),
		"unexpected error": tale{}.calls("a", 1).fails("a", 2, wrong),
		"expired and Unlock returned nil": append(tale{}.calls("a", 1).gets("a", 2, 20), event{What: over, At: 21, Claim: "a"}).
			unlocks("a", 22).unlocked("a", 23, fine),
		"deleted and Unlock returned nil": tale{}.calls("a", 1).gets("a", 2, 100).wiped(3, 4, "orders").
			unlocks("a", 5).unlocked("a", 6, fine),
		"of a lease": append(tale{}.calls("a", 1).gets("a", 2, 100), event{What: brief, At: 3, Claim: "a", Err: "1 ms of a lease of 9 ms"}),
		"though its owner held": tale{}.calls("a1", 1).as("A").gets("a1", 2, 100).calls("a2", 3).as("A").fails("a2", 4, refused).
			unlocks("a1", 5).unlocked("a1", 6, fine),
		"was not found":       tale{}.calls("a", 1).gets("a", 2, 100).leaves("a", 3, "id", fine).calls("b", 4).adopts("id").fails("b", 5, nowhere),
		"contexts ended":      tale(slices.Repeat([]event{{What: late, At: int64(3 * time.Millisecond), Until: int64(time.Millisecond)}}, enoughLate)),
		"a request for":       {{What: oversized, At: 1, Until: 2, Outcome: refused}},
		"context did not end": append(tale{}.calls("a", 1).gets("a", 2, 100), event{What: silent, At: 3, Claim: "a"}),
	} {
		wrongs := newHistory(s).check(t.TempDir(), checkTimeout)
		require.Len(t, wrongs, 1, what)
		assert.Contains(t, wrongs[0], what)
	}
	for what, s := range map[string]tale{
		"an ordinary hold": tale{}.calls("a", 1).gets("a", 2, 100).unlocks("a", 3).unlocked("a", 4, fine),
		"an owner whose hold has ended": tale{}.calls("a1", 1).as("A").gets("a1", 2, 100).unlocks("a1", 3).unlocked("a1", 4, fine).
			calls("a2", 5).as("A").fails("a2", 6, refused),
		"another has adopted it": tale{}.calls("a", 1).gets("a", 2, 100).leaves("a", 3, "id", fine).
			calls("b", 4).adopts("id").gets("b", 5, 100).calls("c", 4).adopts("id").fails("c", 6, nowhere),
		"adopted after an unknown outcome": tale{}.calls("a", 1).gets("a", 2, 100).leaves("a", 3, "id", unknown).
			calls("b", 4).adopts("id").fails("b", 5, nowhere),
		"few late contexts": tale(slices.Repeat([]event{{What: late, At: int64(3 * time.Millisecond)}}, enoughLate-1)),
	} {
		assert.Empty(t, newHistory(s).check(t.TempDir(), checkTimeout), what)
	}
}

// leaves detaches the hold of a claim at a time.
func (s tale) leaves(claim string, at int64, id string, o outcome) tale {
	s = append(s, event{What: leaving, At: at, Claim: claim}).unlocked(claim, at, o)
	return append(s, event{What: left, At: at, Claim: claim, ID: id})
}

// adopts makes the latest call one of Adopt.
func (s tale) adopts(id string) tale {
	s[len(s)-1].ID = id
	return s
}

func TestIdleLocks(t *testing.T) {
	const second = int64(time.Second)
	on := func(s tale) tale {
		for i := range s {
			if s[i].Lock == "orders" {
				s[i].Lock = "queue-1"
			}
		}
		return s
	}
	for name, c := range map[string]struct {
		tale   tale
		wrongs int
	}{
		"idle":              {tale{}.calls("a", 1).gets("a", 2, 9*second).calls("b", 3).unlocks("a", 4).unlocked("a", 5, fine).gets("b", second, 9*second), 1},
		"nobody waits":      {tale{}.calls("a", 1).gets("a", 2, 9*second).unlocks("a", 4).unlocked("a", 5, fine).calls("b", second).gets("b", second+1, 9*second), 0},
		"held":              {tale{}.calls("a", 1).gets("a", 2, 9*second).calls("b", 3).unlocks("a", second).unlocked("a", second+1, fine).gets("b", second+2, 9*second), 0},
		"until its lease":   {tale{}.calls("a", 1).gets("a", 2, second).calls("b", 3).unlocks("a", 4).unlocked("a", 5, unknown).gets("b", second+2, 9*second), 0},
		"a busy machine":    {append(tale{}.calls("a", 1).gets("a", 2, 9*second).calls("b", 3).unlocks("a", 4).unlocked("a", 5, fine).gets("b", second, 9*second), event{What: disturbed, At: 6, Until: 7}), 0},
		"another that left": {tale{}.calls("a", 1).gets("a", 2, 9*second).calls("b", 3).calls("c", 3).unlocks("a", 4).unlocked("a", 5, fine).fails("c", 6, unknown).gets("b", second, 9*second), 0},
	} {
		assert.Len(t, newHistory(on(c.tale)).idle("queue-1"), c.wrongs, name)
	}
}

func TestOvertaking(t *testing.T) {
	const round, hour = int64(time.Second), int64(time.Hour)
	inOrder := tale{}.calls("a", 1).queues("a", 2).calls("b", 3).gets("a", 4, 100).gets("b", 101, 200)
	overtaken := tale{}.calls("a", 1).queues("a", 2).calls("b", 3).gets("b", 4, 100).gets("a", 101, 200)
	early := tale{}.calls("a", 1).calls("b", 3).queues("a", 4).gets("b", 4, 100).gets("a", 101, 200)
	reentry := tale{}.calls("b0", 1).as("B").gets("b0", 2, hour).
		calls("a", 3).queues("a", 4).calls("b", 5).as("B").gets("b", 6, hour).gets("a", 7, hour)
	several := tale{}.calls("a", 1).queues("a", 2).calls("b", 3).of("multi", "others").gets("b", 4, 100).gets("a", 101, 200)
	gaveUp := tale{}.calls("a", 1).queues("a", 2).calls("b", 3).gets("b", 4, 100).fails("a", 5, refused)
	for name, c := range map[string]struct {
		tale          tale
		wrongs, pairs int
	}{
		"in order":               {inOrder, 0, 1},
		"overtaken":              {overtaken, 1, 1},
		"not queued yet":         {early, 0, 0},
		"re-entry":               {reentry, 0, 0},
		"a fault":                {slices.Concat(overtaken, tale{{What: disturbed, At: 2, Until: 3}}), 0, 0},
		"a fault long before":    {slices.Concat(overtaken, tale{{What: disturbed, At: -3 * round, Until: -2 * round}}), 1, 1},
		"a fault that lasted":    {slices.Concat(overtaken, tale{{What: disturbed, At: -3 * round, Until: -round / 2}}), 0, 0},
		"on several locks":       {several, 0, 0},
		"the first has given up": {gaveUp, 0, 0},
	} {
		wrongs, pairs := newHistory(c.tale).overtaken("orders")
		assert.Len(t, wrongs, c.wrongs, name)
		assert.Equal(t, c.pairs, pairs, name)
	}
}

func TestLatchModel(t *testing.T) {
	const full = latchCount
	call := func(s tale, id string, what step, at, returned int64, left int, o outcome) tale {
		s = append(slices.Clone(s), event{What: counting, At: at, Claim: id, Lock: "latch", Kind: string(what)})
		if returned == 0 {
			return s
		}
		return append(s, event{What: counted, At: returned, Claim: id, Left: left, Outcome: o})
	}
	var down tale // to 0, from 1 on
	for i := range full {
		down = call(down, fmt.Sprint(i), countDown, int64(2*i+1), int64(2*i+2), full-1-i, fine)
	}
	var unknowns tale
	for i := range full {
		unknowns = call(unknowns, fmt.Sprint(i), countDown, 1, 2, 0, unknown)
	}
	one := call(nil, "a", countDown, 1, 2, full-1, fine)
	lost := call(nil, "a", countDown, 1, 2, 0, unknown)
	counts := func(s tale, count int) tale { return call(s, "z", readCount, 3, 4, count, fine) }
	for name, c := range map[string]struct {
		tale  tale
		legal bool
	}{
		"counted down":                 {call(down, "z", await, 1, 2*full, 0, fine), true},
		"a Wait that returns early":    {call(down, "z", await, 1, 2*full-2, 0, fine), false},
		"a Wait that gives up":         {call(down, "z", await, 1, 2, 0, failed), true},
		"counted once":                 {call(one, "b", countDown, 3, 4, full-2, fine), true},
		"counted twice":                {call(nil, "a", countDown, 1, 2, full-2, fine), false},
		"not counted":                  {counts(one, full), false},
		"without a reply, counted":     {counts(lost, full-1), true},
		"without a reply, not counted": {counts(lost, full), true},
		"without a reply, twice":       {counts(lost, full-2), false},
		"failed, yet counted":          {counts(call(nil, "a", countDown, 1, 2, 0, failed), full-1), false},
		"killed":                       {counts(call(nil, "a", countDown, 1, 0, 0, ""), full-1), true},
		"all may have counted":         {call(unknowns, "z", await, 3, 4, 0, fine), true},
		"deleted":                      {call(tale{}.wiped(1, 2, ""), "z", await, 3, 4, 0, fine), true},
		"counted and forgotten":        {call(counts(tale{}.wiped(5, 6, ""), full-1), "a", countDown, 1, 7, 0, fine), true},
		"counted, and only it deleted": {call(counts(tale{}.wiped(5, 6, "latch"), full-1), "a", countDown, 1, 7, 0, fine), false},
	} {
		want := porcupine.Illegal
		if c.legal {
			want = porcupine.Ok
		}
		ops := newHistory(c.tale).latchOperations("latch")
		assert.Equal(t, want, porcupine.CheckOperationsTimeout(latchModel, ops, checkTimeout), name)
	}
}

// A lock without a verdict in time has not passed.
func TestCheckReportsTimeout(t *testing.T) {
	var s tale
	for i := range 40 { // in any order, and none is legal
		claim := fmt.Sprint(i)
		s = s.calls(claim, 1).gets(claim, 10, 0)
	}
	s = s.calls("a", 11).gets("a", 12, 100).calls("b", 13).gets("b", 14, 100)
	wrongs := newHistory(s).check(t.TempDir(), 50*time.Millisecond)
	require.Len(t, wrongs, 1)
	assert.Contains(t, wrongs[0], "Unknown")
}
