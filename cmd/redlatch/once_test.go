package main

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

func noWork(context.Context) error { return nil }

// isPending reports whether the work of a slot would run.
func isPending(t *testing.T, c *redlatch.Client, name, slot string) bool {
	t.Helper()
	done, err := c.Once(name).Done(t.Context(), slot)
	require.NoError(t, err)
	return !done
}

// maskedSlots replaces what differs from run to run.
func maskedSlots(text string) string {
	text = regexp.MustCompile(`20\d\d-\d\d-\d\dT[0-9:]+Z`).ReplaceAllString(text, "WHEN")
	text = regexp.MustCompile(`\b\d+h\d+m\d+s\b`).ReplaceAllString(text, "TIME")
	return masked(text)
}

// Slots that run and slots that are done are shown as such, by each command that shows objects.
func TestSlotsAreShown(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		job := c.Once("report", once.Remember(2*time.Hour))
		mustLock(t, c.Lock("report"), lock.Lease(time.Minute))
		_, err := job.Run(t.Context(), "a b", noWork)
		require.NoError(t, err)
		_, err = c.Once("{app}other").Run(t.Context(), "1", noWork)
		require.NoError(t, err)

		waiter := harness.Client(t, s)
		_, err = job.Run(t.Context(), "monday", func(context.Context) error {
			waits := harness.Start(t, t.Context(), func(ctx context.Context) (bool, error) {
				return waiter.Once("report").Run(ctx, "monday", noWork)
			})
			harness.Waits(t, 1, waiter)
			harness.Eventually(t, patience, "it listens", func() bool { return waiter.Stats().PubSub.Subscribed == 1 })

			require.Equal(t, `NAME KIND STATE EXPIRES WAITERS HOLDER
redlatch_once:{report}:a+b once done TIME - -
redlatch_once:{report}:monday once running TIME 1 OWNER
redlatch_once_tagged:{app}other:1 once done TIME - -
report lock held TIME - OWNER
`, maskedSlots(succeeds(t, s.Addr, "ls")))
			require.Equal(t, `NAME KIND STATE EXPIRES WAITERS HOLDER
redlatch_once:{report}:monday once running TIME 1 OWNER
report lock held TIME - OWNER
`, maskedSlots(succeeds(t, s.Addr, "ls", "--held")))
			require.Equal(t, `NAME SLOT STATE SINCE EXPIRES WAITERS HOLDER
report a b done WHEN TIME - -
report monday running - TIME 1 OWNER
{app}other 1 done WHEN TIME - -
`, maskedSlots(succeeds(t, s.Addr, "once", "ls")))
			require.Equal(t, "NAME SLOT STATE SINCE EXPIRES WAITERS HOLDER\nreport monday running - TIME 1 OWNER\n",
				maskedSlots(succeeds(t, s.Addr, "once", "ls", "*:monday")))
			require.Equal(t, 2, strings.Count(succeeds(t, s.Addr, "once", "ls", "report", "--json"), "\n"))

			require.Equal(t, `name redlatch_once:{report}:monday
kind slot of once-only work
work report
slot monday
state running
expires TIME
subscribers 1

HOLDER LEASE LIBRARY
OWNER TIME redlatch process PROCESS, connected for TIME, client since TIME
`, maskedSlots(succeeds(t, s.Addr, "inspect", wire.OnceRun("report", "monday"))))
			require.Regexp(t, `^redlatch_once:{report}:monday is a slot of once-only work: running.
OWNER of redlatch holds it; its lease ends in TIME.
That is process PID on host HOST, connected from ADDRESS for TIME. It sent its last request TIME ago.
1 connection listens to it.
`, maskedSlots(succeeds(t, s.Addr, "doctor", "--watch", "1ms", wire.OnceRun("report", "monday"))))

			_, rows := take(t, samplerOf(t, s, "report"))
			require.Len(t, rows, 3)
			require.Equal(t, 1, waiting(rows[wire.OnceRun("report", "monday")].Object))
			waits.Leave()
			return nil
		})
		require.NoError(t, err)

		for _, name := range []string{wire.OnceRun("report", "a b"), wire.OnceDone("report", "a b")} {
			require.Equal(t, fmt.Sprintf(`name %s
key redlatch_once:{report}:a+b
kind slot of once-only work
work report
slot a b
state done
done by OWNER
done since WHEN
expires TIME
subscribers 0
`, wire.OnceDone("report", "a b")),
				strings.Replace(maskedSlots(succeeds(t, s.Addr, "inspect", name)),
					"name redlatch_once:{report}:a+b\n", "name redlatch_once_done:{report}:a+b\nkey redlatch_once:{report}:a+b\n", 1))
			require.Equal(t, "Slot a b of report is done since WHEN, by OWNER of redlatch. The server remembers that for TIME. "+
				"To let the work run again, use this command: redlatch once forget '"+name+"'\n",
				maskedSlots(succeeds(t, s.Addr, "doctor", name)))
		}
		require.Equal(t, "Slot new of report is not done, and nobody runs its work. The next call of Run does.\n",
			succeeds(t, s.Addr, "doctor", wire.OnceRun("report", "new")))
		var o inspect.Object
		require.NoError(t, json.Unmarshal([]byte(succeeds(t, s.Addr, "once", "ls", "--json", "*:a+b")), &o))
		require.Equal(t, inspect.Once, o.Kind)
		require.Equal(t, "a b", o.Slot.Slot)
		require.Contains(t, o.Slot.Done.By.ID, c.ID())
		o.Subscribers = 1
		require.True(t, isSettled(o), "doctor need not watch connections that listened to the run")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// An operator marks a slot as done, for a day or for --remember, and lets it run again.
func TestOnceDoneAndForget(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		lasts := func(want time.Duration) {
			t.Helper()
			require.InDelta(t, want.Milliseconds(), harness.PTTL(t, s.Addr, wire.OnceDone("app:report", "a:b")), 60_000)
		}
		for _, row := range []struct{ args, want string }{
			{"once forget app:report a:b", "app:report a:b was not done\n"},
			{"once done app:report a:b", "app:report a:b is done now\n"},
			{"once done app:report a:b", "app:report a:b was done already\n"},
			{"--prefix app: once forget report a:b", "report a:b was done and can run again\n"},
			{"--prefix app: once done redlatch_once_done:{report}:a%3Ab", "report a:b is done now\n"},
			{"once forget redlatch_once:{app:report}:a%3Ab", "app:report a:b was done and can run again\n"},
		} {
			require.Equal(t, row.want, succeeds(t, s.Addr, strings.Fields(row.args)...), row.args)
			require.Equal(t, strings.Contains(row.args, "forget"), isPending(t, c, "app:report", "a:b"), row.args)
			if strings.Contains(row.args, "done ") {
				lasts(once.DefaultRemember)
			}
		}
		succeeds(t, s.Addr, "once", "done", "--remember", "744h", "app:report", "a:b")
		lasts(744 * time.Hour)
		succeeds(t, s.Addr, "once", "done", "app:report", "a:b")
		lasts(744 * time.Hour)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// unlock does not let finished work run again. It opens the lock of a run.
func TestUnlockOfSlots(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, prefix := range []string{"", "app:"} {
			c := harness.Client(t, s, redlatch.WithNameMapper(func(name string) string { return prefix + name }))
			redlatch := func(args ...string) []string { return append([]string{"--prefix", prefix}, args...) }
			_, err := c.Once("report").Run(t.Context(), "1", noWork)
			require.NoError(t, err)
			run, memory := wire.OnceRun("report", "1"), wire.OnceDone("report", "1")
			for _, name := range []string{run, memory} {
				for _, flags := range [][]string{nil, {"--kind", "plain"}, {"--kind", "lock"}} {
					args := redlatch(append([]string{"unlock", "--force", name}, flags...)...)
					fails(t, s.Addr, statusFailed, "once forget", args...)
					require.False(t, isPending(t, c, "report", "1"))
				}
			}
			_, err = (&connection{url: "redis://" + s.Addr, prefix: prefix}).forceUnlock(t.Context(), run) // as top does
			require.ErrorContains(t, err, "once forget")
			require.False(t, isPending(t, c, "report", "1"))

			waiter := harness.Client(t, s)
			_, err = c.Once("report").Run(t.Context(), "2", func(context.Context) error {
				waits := harness.StartLock(t, t.Context(), waiter.Lock(wire.OnceRun(prefix+"report", "2")))
				harness.Waits(t, 1, waiter)
				name := wire.OnceRun("report", "2")
				fails(t, s.Addr, statusFailed, "is of kind lock", redlatch("unlock", "--force", "--kind", "plain", name)...)
				require.Equal(t, name+" was held and is open now\n", succeeds(t, s.Addr, redlatch("unlock", "--force", name)...))
				require.NoError(t, waits.Got().Unlock(t.Context()))
				require.Equal(t, name+" was not held\n", succeeds(t, s.Addr, redlatch("unlock", "--force", name)...))
				return nil
			})
			require.ErrorIs(t, err, lock.ErrLost)
			require.False(t, isPending(t, c, "report", "2"), "it has succeeded")
			harness.Do(t, s.Addr, "FLUSHALL")
		}
	})
}
