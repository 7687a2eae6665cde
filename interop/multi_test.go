package interop

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A sites is one server or several, with a client of each language on each.
type sites struct {
	places []*place
	ours   []*redlatch.Client
	theirs []*redisson
}

func sitesAt(t *testing.T, places ...*place) sites {
	s := sites{places: places}
	for _, p := range places {
		s.ours = append(s.ours, p.ours(t))
		s.theirs = append(s.theirs, p.theirs(t))
	}
	return s
}

// onSites runs a test with versions of Redisson on so many servers, one for each
// member of a lock, which are empty.
func onSites(t *testing.T, servers int, test func(t *testing.T, s sites)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := []*testserver.Server{s}
		for len(all) < servers {
			all = append(all, harness.Server(t, s.Program))
		}
		for _, version := range versions() {
			t.Run("Redisson "+version, func(t *testing.T) {
				flush(t, all)
				var places []*place
				for _, s := range all {
					places = append(places, at(t, version, s))
				}
				test(t, sitesAt(t, places...))
			})
		}
	})
}

type keyLock = harness.Lock

// compound lets a lock of locks stand where one of a single key can. It has only
// what is overridden here.
type compound struct {
	keyLock
	l lock.Locker
}

func (c compound) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return c.l.Lock(ctx, opts...)
}

func (c compound) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return c.l.TryLock(ctx, opts...)
}

// who takes locks: one of the two languages.
type who struct {
	name string
	ids  []string // of its clients
	door func(o object) door
}

// waits has the side begin to take a lock of locks, without end, and returns when it
// waits for one of these members, which somebody else has: it has tried to get that
// twice, and so was refused.
func (s sites) waits(t *testing.T, w who, d door, thread uint64, of ...object) *entry {
	t.Helper()
	var tried []*attempts
	for _, m := range of {
		tried = append(tried, s.places[m.At].watch(t, m.Name, w.ids...))
	}
	e := d.take(t, thread, forever, 0)
	harness.Eventually(t, answers, w.name+" waits", func() bool {
		return slices.ContainsFunc(tried, func(a *attempts) bool { return a.count() >= 2 })
	})
	require.False(t, e.ended(), "it does not wait")
	return e
}

// getsIn fails the test unless the attempt has the lock soon after began, and not before.
func (e *entry) getsIn(t *testing.T, began time.Time) {
	t.Helper()
	require.False(t, e.gets(t, answers).Before(began), "it did not wait")
}

// releasesMost releases a lock of which only a majority is held. Java says that the rest
// is not, at least if it is asked asynchronously.
func (w who) releasesMost(t *testing.T, d door, thread uint64) {
	t.Helper()
	err := d.release(t, thread)
	if w.name == "Java" {
		require.ErrorIs(t, err, lock.ErrNotHeld)
		return
	}
	require.NoError(t, err)
}

func (s sites) theirDoor(o object) door {
	return &javaDoor{c: s.theirs[0], object: o.in(s.theirs)}
}

func (s sites) ourDoor(o object) door {
	d := &goDoor{side: goSide{c: s.ours[0]}, held: map[uint64][]lock.Hold{}}
	l := o.lock(s.ours)
	if key, ok := l.(harness.Lock); ok {
		d.l = key
	} else {
		d.l = compound{l: l}
	}
	return d
}

// each runs a test with Go first and Java second, and the other way round, at the same
// time, with objects of their own: their names begin with a prefix. It returns when both
// have ended.
func (s sites) each(t *testing.T, test func(t *testing.T, first, second who, prefix string)) {
	t.Helper()
	java, ours := who{name: "Java", door: s.theirDoor}, who{name: "Go", door: s.ourDoor}
	for i := range s.places {
		java.ids, ours.ids = append(java.ids, s.theirs[i].id), append(ours.ids, s.ours[i].ID())
	}
	t.Run("both ways", func(t *testing.T) {
		for _, pair := range [][2]who{{ours, java}, {java, ours}} {
			t.Run(pair[0].name+", then "+pair[1].name, func(t *testing.T) {
				t.Parallel()
				test(t, pair[0], pair[1], "of "+t.Name()+" ")
			})
		}
	})
}

// whole returns a lock with members of those kinds and names that begin with the
// prefix, spread over the sites.
func (s sites) whole(kind, prefix string, kinds ...string) object {
	o := object{Kind: kind}
	for i, k := range kinds {
		o.Members = append(o.Members, object{Kind: k, Name: prefix + string(rune('a'+i)), At: i % len(s.places)})
	}
	return o
}

// reversed returns the same lock with its members in the opposite order.
func (o object) reversed() object {
	o.Members = slices.Clone(o.Members)
	slices.Reverse(o.Members)
	return o
}

// givenBack is within what time an attempt that was over before it was answered has given
// back what it got, long before a lease is over.
const givenBack = 10 * time.Second

// members are what the locks of a MultiLock can be.
var members = map[string][]string{
	"of locks": {"lock", "lock", "lock"},
	"mixed":    {"lock", "fair", "write"},
}

func TestMultiLocksExcludeEachOtherAndTheirMembers(t *testing.T) {
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		t.Run(name, func(t *testing.T) {
			onSites(t, servers, func(t *testing.T, s sites) {
				for name, kinds := range members {
					t.Run(name, func(t *testing.T) {
						s.each(t, func(t *testing.T, first, second who, prefix string) {
							all := s.whole("multi", prefix, kinds...)
							held := first.door(all)
							held.take(t, 1, 0, 0).gets(t, answers)
							for _, o := range []object{all, all.reversed(), all.Members[0], all.Members[1], all.Members[2]} {
								second.door(o).take(t, 1, 0, 0).fails(t, answers)
								second.door(o).take(t, 2, shortly, 0).fails(t, answers)
							}
							waiting := second.door(all.reversed())
							waits := s.waits(t, second, waiting, 3, all.Members...)
							began := time.Now()
							require.NoError(t, held.release(t, 1))
							waits.getsIn(t, began)
							held.take(t, 1, 0, 0).fails(t, answers)
							require.NoError(t, waiting.release(t, 3))

							// One member is enough to keep all from the other, and the
							// others are free then.
							for i, member := range all.Members {
								one := first.door(member)
								one.take(t, 4, 0, 0).gets(t, answers)
								for thread, o := range []object{all, all.reversed()} {
									d := second.door(o)
									d.take(t, uint64(thread), 0, 0).fails(t, answers)
									d.take(t, uint64(thread), shortly, 0).fails(t, answers)
								}
								for _, other := range slices.Delete(slices.Clone(all.Members), i, i+1) {
									d := first.door(other)
									d.take(t, 5, givenBack, 0).gets(t, answers)
									require.NoError(t, d.release(t, 5))
								}
								waits := s.waits(t, second, waiting, 6, member)
								began := time.Now()
								require.NoError(t, one.release(t, 4))
								waits.getsIn(t, began)
								require.NoError(t, waiting.release(t, 6))
							}
						})
					})
				}
				for _, p := range s.places {
					p.nothingStays(t)
				}
			})
		})
	}
}

func TestRedLocksExcludeEachOther(t *testing.T) {
	onSites(t, 3, func(t *testing.T, s sites) {
		s.each(t, func(t *testing.T, first, second who, prefix string) {
			all := s.whole("red", prefix, "lock", "lock", "lock")
			held, theirs := first.door(all), second.door(all)
			held.take(t, 1, 0, 0).gets(t, answers)
			theirs.take(t, 1, 0, 0).fails(t, answers)
			theirs.take(t, 1, shortly, 0).fails(t, answers)
			waits := s.waits(t, second, theirs, 2, all.Members...)
			began := time.Now()
			require.NoError(t, held.release(t, 1))
			waits.getsIn(t, began)
			held.take(t, 1, 0, 0).fails(t, answers)
			require.NoError(t, theirs.release(t, 2))

			for without := range all.Members {
				// Two of three are a majority for the other.
				var singles []door
				for _, m := range slices.Delete(slices.Clone(all.Members), without, without+1) {
					d := first.door(m)
					d.take(t, 3, 0, 0).gets(t, answers)
					singles = append(singles, d)
				}
				theirs.take(t, 4, 0, 0).fails(t, answers)
				theirs.take(t, 4, shortly, 0).fails(t, answers)
				last := first.door(all.Members[without])
				last.take(t, 3, givenBack, 0).gets(t, answers)
				require.NoError(t, last.release(t, 3))
				// One is not, and what is released without it is free.
				require.NoError(t, singles[0].release(t, 3))
				theirs.take(t, 5, 2*time.Second, 0).gets(t, answers)
				held.take(t, 1, 0, 0).fails(t, answers)
				second.releasesMost(t, theirs, 5)
				held.take(t, 1, 2*time.Second, 0).gets(t, answers)
				theirs.take(t, 4, 0, 0).fails(t, answers)
				first.releasesMost(t, held, 1)
				require.NoError(t, singles[1].release(t, 3))
			}
		})
		for _, p := range s.places {
			p.nothingStays(t)
		}
	})
}

// inOrder returns n places with a server each, in the order in which locks of locks of
// ours take their members: that of the servers' ids.
func inOrder(t *testing.T, n int) (places []*place) {
	t.Helper()
	ids := map[*place]string{}
	for range n {
		s := harness.Own(t, testserver.Redis)
		info, err := testserver.Info(s.Addr, "server")
		require.NoError(t, err)
		p := at(t, newest, s)
		places, ids[p] = append(places, p), info["run_id"]
	}
	slices.SortFunc(places, func(a, b *place) int { return strings.Compare(ids[a], ids[b]) })
	return places
}

// TestContendersForLocksOfLocks has contenders of both languages take several locks
// at once, and single ones of them. Java takes them in our order.
func TestContendersForLocksOfLocks(t *testing.T) {
	ofRedis(t)
	contend := func(name string, servers, rounds int, objects func(s sites) []object) {
		t.Run(name, func(t *testing.T) {
			places := inOrder(t, servers)
			c := contest{Work: "exclude", Rounds: rounds, Contenders: 8, Objects: objects(sites{places: places})}
			results := c.hold(t, places, 1, []*jvm{places[0].j})
			want := map[string]int{}
			for _, r := range results {
				require.Positive(t, sum(r.Shares))
				for i, had := range r.Shares {
					for _, name := range c.Objects[i%len(c.Objects)].names() {
						want[name] += had
					}
				}
			}
			conn := places[0].conn(t)
			for name, want := range want {
				n, err := do(t, conn, "GET", "counter:"+name).AsInt64()
				require.NoError(t, err)
				require.EqualValues(t, want, n, name)
			}
			for _, p := range places {
				p.nothingStays(t)
			}
		})
	}
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		for kinds, of := range members {
			contend("multi, "+kinds+", "+name, servers, 1000, func(s sites) []object {
				all := s.whole("multi", "", of...)
				return append([]object{all}, all.Members...)
			})
		}
	}
	contend("red", 3, 500, func(s sites) []object {
		return []object{s.whole("red", "", "lock", "lock", "lock")}
	})
}

// TestMultiLocksInOppositeOrdersDoNotBlockEachOtherForEver has Java take members in an
// order that is not ours. Each has one that the other waits for. Java gives up after
// 1.5 s for each member, but is often the first to take it again; we give up after 5 s
// to 10 s. Who contends like that all the time lives on these pauses: Java should use
// our order.
func TestMultiLocksInOppositeOrdersDoNotBlockEachOtherForEver(t *testing.T) {
	ofRedis(t)
	const patience = 10 * time.Second
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		t.Run(name, func(t *testing.T) {
			s := sitesAt(t, inOrder(t, servers)...)
			for name, kinds := range members {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					all := s.whole("multi", name+" ", kinds...)
					middle := s.ourDoor(all.Members[1])
					middle.take(t, 1, 0, 0).gets(t, answers)
					ours, theirs := s.ourDoor(all), s.theirDoor(all.reversed())
					waitsHere := ours.take(t, 2, forever, 0)
					taken := func(m object, since string) {
						harness.Eventually(t, answers, since, func() bool { return s.ourDoor(m).locked(t) })
					}
					taken(all.Members[0], "Go has the first")
					waitsThere := theirs.take(t, 3, forever, 0)
					taken(all.Members[2], "Java has the last")
					require.NoError(t, middle.release(t, 1))
					begin := time.Now()
					each := func(name string, waits *entry, d door, thread uint64) {
						t.Run(name, func(t *testing.T) {
							t.Parallel()
							t.Log("after", waits.gets(t, patience+answers).Sub(begin).Round(time.Millisecond))
							require.NoError(t, d.release(t, thread))
						})
					}
					each("Go", waitsHere, ours, 2)
					each("Java", waitsThere, theirs, 3)
				})
			}
		})
	}
}
