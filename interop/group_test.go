package interop

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/grouplock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// codec is how clients of Redisson write the values of a group.
type codec struct {
	class string
	// values returns values for Go, and for Java.
	values func(numbers ...int) (ours []string, theirs []any)
}

var codecs = []codec{
	{"org.redisson.codec.Kryo5Codec", func(numbers ...int) ([]string, []any) {
		ours, theirs := seats(numbers)
		return grouplock.Kryo5(ours...), theirs
	}},
	{"org.redisson.client.codec.StringCodec", func(numbers ...int) ([]string, []any) { return seats(numbers) }},
	{"org.redisson.client.codec.LongCodec", func(numbers ...int) (ours []string, theirs []any) {
		for _, n := range numbers {
			ours, theirs = append(ours, grouplock.Longs(int64(n))...), append(theirs, n)
		}
		return ours, theirs
	}},
}

func seats(numbers []int) (ours []string, theirs []any) {
	for _, n := range numbers {
		name := fmt.Sprint("seat ", n)
		ours, theirs = append(ours, name), append(theirs, name)
	}
	return ours, theirs
}

// eachCodec runs a test for each version of Redisson that has the lock, and each codec, or in the first tier the
// default, with unique names.
func eachCodec(t *testing.T, test func(t *testing.T, p *env, c codec, name string)) {
	t.Helper()
	eachEnv(t, func(t *testing.T, p *env) {
		if !has(p.version, "group") {
			return
		}
		all := codecs
		if testing.Short() {
			all = codecs[:1]
		}
		for _, c := range all {
			t.Run(c.class[strings.LastIndex(c.class, ".")+1:], func(t *testing.T) {
				with := *p
				with.codec = c.class
				test(t, &with, c, "seats of "+t.Name())
			})
		}
	})
}

// group returns the lock of values of a group as a side sees it.
func (c codec) group(s side, name string, numbers ...int) view {
	ours, theirs := c.values(numbers...)
	if java, is := s.(javaSide); is {
		object := java.c.object("group", name)
		object["values"] = theirs
		return &javaView{c: java.c, object: object}
	}
	g := s.(goSide)
	return &goView{side: g, l: g.c.GroupLock(name, ours...), held: map[uint64][]lock.Hold{}}
}

// Locks of both sides exclude each other if they have a value in common.
func TestGroupsOfBothSidesExcludeEachOther(t *testing.T) {
	eachCodec(t, func(t *testing.T, p *env, c codec, name string) {
		p.eachPair(t, func(t *testing.T, first, second side) {
			held := c.group(first, name, 1, 2)
			for _, lease := range []time.Duration{0, time.Minute} {
				held.take(t, 1, 0, lease).gets(t, answers)
				for _, numbers := range [][]int{{1}, {2}, {2, 1}, {3, 2}, {4, 1, 3}} {
					theirs := c.group(second, name, numbers...)
					require.True(t, theirs.locked(t))
					theirs.take(t, 1, 0, 0).fails(t, answers)
					theirs.take(t, 1, shortly, time.Minute).failsAfter(t, shortly)
				}
				require.ErrorIs(t, c.group(second, name, 1, 2).release(t, 1), lock.ErrNotHeld)
				other := c.group(second, name, 3, 4)
				require.False(t, other.locked(t))
				other.take(t, 1, 0, lease).gets(t, answers)
				require.NoError(t, other.release(t, 1))
				require.NoError(t, held.release(t, 1))

				next := c.group(second, name, 2, 3)
				next.take(t, 1, 0, lease).gets(t, answers)
				require.NoError(t, next.release(t, 1))
			}
			one, theirs := c.group(first, name, 1), c.group(second, name, 1)
			one.take(t, 1, 0, long).gets(t, answers)
			require.True(t, theirs.force(t)) // for several values Redisson says that there was none
			require.False(t, one.locked(t))
		})
		harness.NothingStays(t, p.addrs()[0])
	})
}

// Both sides write the same bytes for values of many lengths and scripts.
func TestGroupsOfBothSidesHaveTheSameFields(t *testing.T) {
	strs := []string{"", "a", "ab", "a\x7f", "\x00", "é", "aé", "日本", "😀"}
	for _, n := range []int{7, 8, 15, 16, 17, 31, 32, 33, 62, 63, 64, 65, 126, 127, 128, 8190, 9000} {
		strs = append(strs, strings.Repeat("x", n))
	}
	eachEnv(t, func(t *testing.T, p *env) {
		if !has(p.version, "group") {
			return
		}
		for class, values := range map[string][]string{codecs[0].class: grouplock.Kryo5(strs...), codecs[1].class: strs} {
			with := *p
			with.codec = class
			java := with.theirs(t)
			fields := func(owner string) (names []string) {
				found, err := testserver.Query(p.addrs()[0], "HKEYS", "seats")
				require.NoError(t, err)
				for _, name := range found {
					names = append(names, strings.ReplaceAll(name, owner, "<owner>"))
				}
				return names
			}
			h, err := with.ours(t).GroupLock("seats", values...).TryLock(t.Context())
			require.NoError(t, err)
			ours := fields(lock.OwnerOf(h).String())
			require.NoError(t, h.Unlock(t.Context()))

			object := java.object("group", "seats")
			object["values"] = strs
			view := javaView{java, object}
			view.take(t, 1, 0, time.Minute).gets(t, answers)
			require.Len(t, ours, 3*len(strs))
			require.ElementsMatch(t, fields(java.id+":1"), ours, class)
			require.NoError(t, view.release(t, 1))
		}
	})
}

// A release wakes each waiter of the other side whose values are free, although several threads of one client of Java
// wait for different values, of which its own message would wake one.
func TestGroupReleaseWakesTheOtherSide(t *testing.T) {
	eachCodec(t, func(t *testing.T, p *env, c codec, name string) {
		java, ours := javaSide{p.theirs(t)}, goSide{p.ours(t), false}
		for _, sides := range [][2]side{{ours, java}, {java, ours}} {
			of := fmt.Sprint(name, sides[0])
			held := c.group(sides[0], of, 1, 2, 3)
			held.take(t, 1, 0, long).gets(t, answers)
			tried := p.watch(t, of)
			var views []view
			var waiting []*entry
			for n := range 3 {
				views = append(views, c.group(sides[1], of, n+1))
				waiting = append(waiting, views[n].take(t, uint64(n+1), time.Minute, long))
			}
			tried.asleep(t, sides[1], len(waiting))

			began := time.Now()
			require.NoError(t, held.release(t, 1))
			for n, e := range waiting {
				e.promptly(t, began)
				require.NoError(t, views[n].release(t, uint64(n+1)))
			}
		}
	})
}

// Holds of both sides are renewed beside each other, each for its own values.
func TestGroupsOfBothSidesAreRenewed(t *testing.T) {
	harness.Full(t)
	const watchdog = 1500 * time.Millisecond
	eachCodec(t, func(t *testing.T, p *env, c codec, name string) {
		t.Parallel()
		java := javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", watchdog.Milliseconds()))}
		ours := goSide{p.ours(t, redlatch.WithWatchdogTimeout(watchdog)), false}
		theirs, mine := c.group(java, name, 1, 2), c.group(ours, name, 3, 4)
		theirs.take(t, 1, 0, 0).gets(t, answers)
		mine.take(t, 1, 0, 0).gets(t, answers)
		for end := time.Now().Add(4 * watchdog); time.Now().Before(end); time.Sleep(shortly) {
			c.group(ours, name, 2).take(t, 2, 0, 0).fails(t, answers)
			c.group(java, name, 4).take(t, 2, 0, 0).fails(t, answers)
		}
		require.NoError(t, theirs.release(t, 1))
		require.NoError(t, mine.release(t, 1))
	})
}

// Callers of both sides lock random values of one group, in random order, again and again. Nobody has a value that somebody
// else has, and all get theirs: there is no deadlock. The leases bound how long Java sleeps if it misses a message.
func TestOverlappingGroupsOfBothSides(t *testing.T) {
	const threads, rounds, places, lease = 3, 8, 5, 10 * time.Second
	eachCodec(t, func(t *testing.T, p *env, c codec, name string) {
		type caller struct {
			side    side
			thread  uint64
			rounds  int
			numbers []int
			l       view
			e       *entry
		}
		var waiting []*caller
		take := func(who *caller) {
			who.numbers = rand.Perm(places)[:1+rand.IntN(places)]
			who.l = c.group(who.side, name, who.numbers...)
			who.e = who.l.take(t, who.thread, time.Minute, lease)
			waiting = append(waiting, who)
		}
		for _, s := range []side{goSide{p.ours(t), false}, goSide{p.ours(t), true}, javaSide{p.theirs(t)}, javaSide{p.theirs(t)}} {
			for thread := range uint64(threads) {
				take(&caller{side: s, thread: thread + 1})
			}
		}
		for len(waiting) > 0 {
			i := -1
			harness.Eventually(t, 2*answers, "one of them gets in", func() bool {
				i = slices.IndexFunc(waiting, func(who *caller) bool { return who.e.ended() })
				return i >= 0
			})
			who := waiting[i]
			waiting = slices.Delete(waiting, i, i+1)
			who.e.gets(t, answers)
			for _, other := range waiting {
				both := slices.ContainsFunc(other.numbers, func(n int) bool { return slices.Contains(who.numbers, n) })
				require.False(t, both && other.e.ended(), "%v and %v are held", who.numbers, other.numbers)
			}
			require.NoError(t, who.l.release(t, who.thread))
			if who.rounds++; who.rounds < rounds {
				take(who)
			}
		}
		harness.NothingStays(t, p.addrs()[0])
	})
}
