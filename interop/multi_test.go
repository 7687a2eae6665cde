package interop

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// sites are three servers, with a client of each language on each.
type sites struct {
	ours   []*redlatch.Client
	theirs []*redisson
}

// member is a member of a composite lock, on the server with its index.
type member struct {
	kind, name string
	at         int
}

type keyLock = harness.Lock

// single adapts a composite lock to a test of a lock with a single key. Other methods do not work.
type single struct {
	keyLock
	l lock.Locker
}

func (c single) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return c.l.Lock(ctx, opts...)
}

func (c single) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return c.l.TryLock(ctx, opts...)
}

// lock returns a composite lock, or the only member, as one of the languages sees it.
func (s sites) lock(java bool, kind string, members ...member) view {
	if java {
		var objects []command
		for _, m := range members {
			objects = append(objects, s.theirs[m.at].object(m.kind, m.name))
		}
		if len(objects) == 1 {
			return &javaView{s.theirs[0], objects[0]}
		}
		return &javaView{s.theirs[0], command{"client": s.theirs[0].name, "kind": kind, "members": objects}}
	}
	var locks []lock.Locker
	for _, m := range members {
		locks = append(locks, goLock(s.ours[m.at], m.kind, m.name))
	}
	l := locks[0]
	if len(locks) > 1 && kind == "red" {
		l = s.ours[0].RedLock(locks)
	} else if len(locks) > 1 {
		l = s.ours[0].MultiLock(locks...)
	}
	return &goView{side: goSide{c: s.ours[0]}, l: single{l: l}, held: map[uint64][]lock.Hold{}}
}

// Composite locks of both languages exclude each other, and their members: all of a MultiLock, and a majority of
// a RedLock. A failed attempt gives back what it has got.
func TestCompositeLocksExcludeEachOther(t *testing.T) {
	harness.Each(t, func(t *testing.T, first *testserver.Server) {
		servers := []*testserver.Server{first, harness.Server(t, first.Program), harness.Server(t, first.Program)}
		for _, version := range versions() {
			var s sites
			for _, server := range servers {
				p := at(t, version, server)
				s.ours, s.theirs = append(s.ours, p.ours(t)), append(s.theirs, p.theirs(t))
			}
			for name, c := range map[string]struct {
				kind    string
				members []string
				spread  int // over the servers, or 0
				decides int // so many members
			}{
				"multi":                  {"multi", []string{"lock", "lock", "lock"}, 0, 1},
				"multi of several kinds": {"multi", []string{"lock", "fair", "write"}, 0, 1},
				"multi on three servers": {"multi", []string{"lock", "fair", "write"}, 1, 1},
				"red":                    {"red", []string{"lock", "lock", "lock"}, 1, 2},
			} {
				for _, java := range []bool{false, true} {
					side := map[bool]string{false: "Go", true: "Java"}[java]
					t.Run("Redisson "+version+"/"+name+"/"+side+" first", func(t *testing.T) {
						t.Parallel()
						var members []member
						for i, kind := range c.members {
							members = append(members, member{kind, t.Name() + string(rune('a'+i)), i * c.spread})
						}
						opposite := slices.Clone(members)
						slices.Reverse(opposite)
						held, theirs := s.lock(java, c.kind, members...), s.lock(!java, c.kind, opposite...)

						held.take(t, 1, 0, 0).gets(t, answers)
						theirs.take(t, 1, 0, 0).fails(t, answers)
						waits := theirs.take(t, 2, forever, 0)
						for _, m := range members {
							if c.kind == "multi" { // the last vote for a Redlock may be under way
								s.lock(!java, "", m).take(t, 3, shortly, 0).fails(t, answers)
							}
						}
						require.False(t, waits.ended())
						require.NoError(t, held.release(t, 1))
						waits.gets(t, answers)
						held.take(t, 1, 0, 0).fails(t, answers)
						require.NoError(t, theirs.release(t, 2))

						// So many members of the others decide, and the rest is free.
						for without := range members {
							decisive := slices.Concat(members, members)[without : without+c.decides]
							var singles []view
							for _, m := range decisive {
								d := s.lock(java, "", m)
								d.take(t, 4, answers, 0).gets(t, answers)
								singles = append(singles, d)
							}
							theirs.take(t, 5, shortly, 0).fails(t, answers)
							for _, m := range members {
								if !slices.Contains(decisive, m) {
									d := s.lock(java, "", m)
									d.take(t, 6, answers/3, 0).gets(t, answers)
									require.NoError(t, d.release(t, 6))
								}
							}
							for _, d := range singles {
								require.NoError(t, d.release(t, 4))
							}
							theirs.take(t, 7, answers, 0).gets(t, answers)
							require.NoError(t, theirs.release(t, 7))
						}
					})
				}
			}
		}
	})
}
