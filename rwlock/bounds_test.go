package rwlock_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// within returns a context that ends later than the reply of a script that looks at as many holds as it may, which
// takes a tenth of a second.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Who can write to the hash of a lock can make no script look at more holds than the lock may have. Such a script
// fails before its first write.
func TestNumbersOfHoldsAreBounded(t *testing.T) {
	for _, program := range harness.Programs(t) {
		for _, counts := range [][]string{
			{"1000000000000000"}, {"1e15"}, {"65536"}, {"65535", "1"}, {"0"}, {"-1"}, {"1.5"}, {"007"}, {"x"}, {""},
		} {
			t.Run(program+" "+fmt.Sprint(counts), func(t *testing.T) {
				// The server is the test's own: unless the scripts are bounded it never answers again.
				l := newLab(t, harness.Own(t, program))
				read, write := l.claim(l.read, time.Minute), l.claim(l.write, time.Minute)
				for _, c := range []struct {
					held *engine.Claim
					call func() error
				}{
					{read, func() error { _, err := l.read.Release(within(t), read); return err }},
					{read, func() error { _, err := l.read.Transfer(within(t), read, owner(1), time.Minute); return err }},
					{read, func() error { _, err := l.read.Force(within(t), key); return err }},
					{write, func() error { _, err := l.write.Release(within(t), write); return err }},
					{write, func() error { _, err := l.write.Transfer(within(t), write, owner(1), time.Minute); return err }},
					{write, func() error { _, err := l.write.Force(within(t), key); return err }},
				} {
					l.take(c.held)
					for i, count := range counts {
						harness.Do(t, l.s.Addr, "HSET", key, owner(9000+i).String(), count)
					}
					before := l.dump()
					require.ErrorContains(t, c.call(), "holds")
					require.Equal(t, before, l.dump())
					harness.Do(t, l.s.Addr, "FLUSHALL")
				}
			})
		}
	}
}

// dump returns everything on the server but times.
func (l *lab) dump() (all []string) {
	l.t.Helper()
	keys, err := testserver.Query(l.s.Addr, "KEYS", "*")
	require.NoError(l.t, err)
	slices.Sort(keys)
	for _, k := range keys {
		value, err := testserver.Query(l.s.Addr, "DUMP", k)
		require.NoError(l.t, err)
		all = append(all, k, value[0])
	}
	return all
}

// A lock has as many holds as Java allows. There is no room for another reader then.
func TestALockHasManyHolds(t *testing.T) {
	const most, mostOwners = 65_535, 10_000
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLab(t, s)
		for name, add := range map[string]func(){
			"of one owner": func() {
				harness.Do(t, s.Addr, "HSET", key, owner(9000).String(), strconv.Itoa(most-1))
			},
			"of many owners": func() {
				words := []string{"HSET", key}
				for i := range mostOwners - 1 {
					words = append(words, owner(9000+i).String(), "1")
				}
				harness.Do(t, s.Addr, words...)
			},
		} {
			c := l.take(l.claim(l.read, time.Minute))
			add()
			r, err := l.read.Release(within(t), c)
			require.NoError(t, err, name)
			require.Equal(t, engine.Free, r.State, "the other holds have no key")

			l.take(l.claim(l.read, time.Minute))
			add()
			other := l.claim(l.read, time.Minute)
			if _, err := l.read.Acquire(within(t), other); name == "of many owners" {
				require.ErrorContains(t, err, "holds")
			} else {
				require.NoError(t, err)
				_, err = l.read.Release(within(t), other)
				require.NoError(t, err)
			}
			forced, err := l.read.Force(within(t), key)
			require.NoError(t, err, name)
			require.True(t, forced)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", key))
		}
	})
}
