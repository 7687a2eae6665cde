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
	envs   []*env
	ours   []*redlatch.Client
	theirs []*redisson
}

func sitesAt(t *testing.T, envs ...*env) sites {
	s := sites{envs: envs}
	for _, p := range envs {
		s.ours = append(s.ours, p.ours(t))
		s.theirs = append(s.theirs, p.theirs(t))
	}
	return s
}

// onSites runs a test with versions of Redisson on n empty servers, one for each member of a
// lock.
func onSites(t *testing.T, servers int, test func(t *testing.T, s sites)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := []*testserver.Server{s}
		for len(all) < servers {
			all = append(all, harness.Server(t, s.Program))
		}
		for _, version := range versions() {
			t.Run("Redisson "+version, func(t *testing.T) {
				flush(t, all)
				var envs []*env
				for _, s := range all {
					envs = append(envs, at(t, version, s))
				}
				test(t, sitesAt(t, envs...))
			})
		}
	})
}

type keyLock = harness.Lock

// compound adapts a composite lock to a test of a lock with a single key. Only the overridden
// methods work.
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

// taker is one of the two languages.
type taker struct {
	name string
	ids  []string // of its clients
	view func(o object) view
}

// waits starts to acquire a composite lock without a time limit. It returns when the side
// waits for one of these members, which are held: the side has tried twice and was refused.
func (s sites) waits(t *testing.T, w taker, d view, thread uint64, of ...object) *entry {
	t.Helper()
	var tried []*attempts
	for _, m := range of {
		tried = append(tried, s.envs[m.At].watch(t, m.Name, w.ids...))
	}
	e := d.take(t, thread, forever, 0)
	harness.Eventually(t, answers, w.name+" waits", func() bool {
		return slices.ContainsFunc(tried, func(a *attempts) bool { return a.count() >= 2 })
	})
	require.False(t, e.ended(), "it does not wait")
	return e
}

// getsIn fails the test unless the attempt succeeds soon after began, and not before.
func (e *entry) getsIn(t *testing.T, began time.Time) {
	t.Helper()
	require.False(t, e.gets(t, answers).Before(began), "it did not wait")
}

// releasesMost releases a lock of which only a majority is held. Java reports that the rest is
// not held, at least to an asynchronous call.
func (w taker) releasesMost(t *testing.T, d view, thread uint64) {
	t.Helper()
	err := d.release(t, thread)
	if w.name == "Java" {
		require.ErrorIs(t, err, lock.ErrNotHeld)
		return
	}
	require.NoError(t, err)
}

func (s sites) theirView(o object) view {
	return &javaView{c: s.theirs[0], object: o.in(s.theirs)}
}

func (s sites) ourView(o object) view {
	d := &goView{side: goSide{c: s.ours[0]}, held: map[uint64][]lock.Hold{}}
	l := o.lock(s.ours)
	if key, ok := l.(harness.Lock); ok {
		d.l = key
	} else {
		d.l = compound{l: l}
	}
	return d
}

// each runs a test with Go first and Java second, and the other way round, in parallel, with
// separate objects: their names begin with a prefix. It returns when both have ended.
func (s sites) each(t *testing.T, test func(t *testing.T, first, second taker, prefix string)) {
	t.Helper()
	java, ours := taker{name: "Java", view: s.theirView}, taker{name: "Go", view: s.ourView}
	for i := range s.envs {
		java.ids, ours.ids = append(java.ids, s.theirs[i].id), append(ours.ids, s.ours[i].ID())
	}
	t.Run("both ways", func(t *testing.T) {
		for _, pair := range [][2]taker{{ours, java}, {java, ours}} {
			t.Run(pair[0].name+", then "+pair[1].name, func(t *testing.T) {
				t.Parallel()
				test(t, pair[0], pair[1], "of "+t.Name()+" ")
			})
		}
	})
}

// composite returns a lock with members of those kinds and names that begin with the prefix,
// spread over the sites.
func (s sites) composite(kind, prefix string, kinds ...string) object {
	o := object{Kind: kind}
	for i, k := range kinds {
		o.Members = append(o.Members, object{Kind: k, Name: prefix + string(rune('a'+i)), At: i % len(s.envs)})
	}
	return o
}

// reversed returns the same lock with its members in the opposite order.
func (o object) reversed() object {
	o.Members = slices.Clone(o.Members)
	slices.Reverse(o.Members)
	return o
}

// givenBack bounds the release of a failed attempt's members, long before a lease expires.
const givenBack = 10 * time.Second

// members are the kinds of the members of a MultiLock.
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
						s.each(t, func(t *testing.T, first, second taker, prefix string) {
							all := s.composite("multi", prefix, kinds...)
							held := first.view(all)
							held.take(t, 1, 0, 0).gets(t, answers)
							for _, o := range []object{all, all.reversed(), all.Members[0], all.Members[1], all.Members[2]} {
								second.view(o).take(t, 1, 0, 0).fails(t, answers)
								second.view(o).take(t, 2, shortly, 0).fails(t, answers)
							}
							waiting := second.view(all.reversed())
							waits := s.waits(t, second, waiting, 3, all.Members...)
							began := time.Now()
							require.NoError(t, held.release(t, 1))
							waits.getsIn(t, began)
							held.take(t, 1, 0, 0).fails(t, answers)
							require.NoError(t, waiting.release(t, 3))

							// One held member excludes all other owners, and the other members
							// are free then.
							for i, member := range all.Members {
								one := first.view(member)
								one.take(t, 4, 0, 0).gets(t, answers)
								for thread, o := range []object{all, all.reversed()} {
									d := second.view(o)
									d.take(t, uint64(thread), 0, 0).fails(t, answers)
									d.take(t, uint64(thread), shortly, 0).fails(t, answers)
								}
								for _, other := range slices.Delete(slices.Clone(all.Members), i, i+1) {
									d := first.view(other)
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
				for _, p := range s.envs {
					p.nothingStays(t)
				}
			})
		})
	}
}

func TestRedLocksExcludeEachOther(t *testing.T) {
	onSites(t, 3, func(t *testing.T, s sites) {
		s.each(t, func(t *testing.T, first, second taker, prefix string) {
			all := s.composite("red", prefix, "lock", "lock", "lock")
			held, theirs := first.view(all), second.view(all)
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
				// Two of three are a majority for the other. A member may still be on its way back: a Redlock
				// of Go is released when a majority is, and a round of it ends before the last vote arrives.
				var singles []view
				for _, m := range slices.Delete(slices.Clone(all.Members), without, without+1) {
					d := first.view(m)
					d.take(t, 3, givenBack, 0).gets(t, answers)
					singles = append(singles, d)
				}
				theirs.take(t, 4, 0, 0).fails(t, answers)
				theirs.take(t, 4, shortly, 0).fails(t, answers)
				last := first.view(all.Members[without])
				last.take(t, 3, givenBack, 0).gets(t, answers)
				require.NoError(t, last.release(t, 3))
				// One is not, and a release of the others makes it free.
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
		for _, p := range s.envs {
			p.nothingStays(t)
		}
	})
}

// inOrder returns n envs with a server each, in the order in which redlatch composite locks acquire
// their members: that of the servers' ids.
func inOrder(t *testing.T, n int) (envs []*env) {
	t.Helper()
	ids := map[*env]string{}
	for range n {
		s := harness.Own(t, redisProgram(t))
		info, err := testserver.Info(s.Addr, "server")
		require.NoError(t, err)
		p := at(t, newest, s)
		envs, ids[p] = append(envs, p), info["run_id"]
	}
	slices.SortFunc(envs, func(a, b *env) int { return strings.Compare(ids[a], ids[b]) })
	return envs
}

// TestContendersForCompositeLocks has contenders of both languages acquire composite locks and
// single members. Java uses our order.
func TestContendersForCompositeLocks(t *testing.T) {
	ofRedis(t)
	contend := func(name string, servers, rounds int, objects func(s sites) []object) {
		t.Run(name, func(t *testing.T) {
			envs := inOrder(t, servers)
			c := contest{Work: "exclude", Rounds: rounds, Contenders: 8, Objects: objects(sites{envs: envs})}
			results := c.hold(t, envs, 1, []*jvm{envs[0].j})
			want := map[string]int{}
			for _, r := range results {
				require.Positive(t, sum(r.Shares))
				for i, had := range r.Shares {
					for _, name := range c.Objects[i%len(c.Objects)].names() {
						want[name] += had
					}
				}
			}
			conn := envs[0].conn(t)
			for name, want := range want {
				n, err := do(t, conn, "GET", "counter:"+name).AsInt64()
				require.NoError(t, err)
				require.EqualValues(t, want, n, name)
			}
			for _, p := range envs {
				p.nothingStays(t)
			}
		})
	}
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		for kinds, of := range members {
			contend("multi, "+kinds+", "+name, servers, 1000, func(s sites) []object {
				all := s.composite("multi", "", of...)
				return append([]object{all}, all.Members...)
			})
		}
	}
	contend("red", 3, 500, func(s sites) []object {
		return []object{s.composite("red", "", "lock", "lock", "lock")}
	})
}

// TestMultiLocksInOppositeOrdersDoNotDeadlock has Java acquire the members in an order that is
// not ours. Each side holds a member that the other waits for. Java gives up a member after
// 1.5 s, but is often the first to acquire it again; we give up after 5 s to 10 s. Permanent
// contention like this depends on these pauses, so Java should use our order.
func TestMultiLocksInOppositeOrdersDoNotDeadlock(t *testing.T) {
	ofRedis(t)
	const patience = 10 * time.Second
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		t.Run(name, func(t *testing.T) {
			s := sitesAt(t, inOrder(t, servers)...)
			for name, kinds := range members {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					all := s.composite("multi", name+" ", kinds...)
					middle := s.ourView(all.Members[1])
					middle.take(t, 1, 0, 0).gets(t, answers)
					ours, theirs := s.ourView(all), s.theirView(all.reversed())
					waitsHere := ours.take(t, 2, forever, 0)
					taken := func(m object, since string) {
						harness.Eventually(t, answers, since, func() bool { return s.ourView(m).locked(t) })
					}
					taken(all.Members[0], "Go has the first")
					waitsThere := theirs.take(t, 3, forever, 0)
					taken(all.Members[2], "Java has the last")
					require.NoError(t, middle.release(t, 1))
					begin := time.Now()
					each := func(name string, waits *entry, d view, thread uint64) {
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
