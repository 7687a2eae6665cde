package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// operatorRights returns the words of the documented ACL SETUSER for operators, with what the table rows that
// begin with these texts add.
func operatorRights(t *testing.T, rows ...string) []string {
	t.Helper()
	page, err := os.ReadFile("../../docs/operations/permissions.md")
	require.NoError(t, err)
	_, operators, found := strings.Cut(string(page), "\n## Operators\n")
	require.True(t, found)
	_, rule, found := strings.Cut(operators, "\n    ACL SETUSER ")
	require.True(t, found)
	rule, _, _ = strings.Cut(rule, "\n\n")
	words := append([]string{"ACL", "SETUSER"}, strings.Fields(rule)...)
	for _, row := range rows {
		_, rest, found := strings.Cut(string(page), "\n| "+row)
		require.True(t, found, row)
		line, _, _ := strings.Cut(rest, "\n")
		_, additions, _ := strings.Cut(line, " | ")
		for i, quoted := range strings.Split(additions, "`") {
			if i%2 == 1 {
				words = append(words, strings.Fields(quoted)...)
			}
		}
	}
	return words
}

// operator returns the address of a server for the user with exactly these rights.
func operator(t *testing.T, s *testserver.Server, rights []string) (addr string) {
	t.Helper()
	harness.Do(t, s.Addr, rights...)
	return "operator:password@" + s.Addr
}

// given makes an object of each kind. All are held, and the lock app:fair has a waiter.
func given(t *testing.T, s *testserver.Server) (names []string) {
	t.Helper()
	const java = "6ba7b810-9dad-41d1-80b4-00c04fd430c8:47"
	run := wire.OnceRun("app:report", "1")
	for _, name := range []string{"app:lock", "app:fair", run} {
		harness.Do(t, s.Addr, "HSET", name, java, "1")
	}
	harness.Do(t, s.Addr, "RPUSH", wire.FairQueue("app:fair"), java)
	harness.Do(t, s.Addr, "ZADD", wire.FairTimeouts("app:fair"), "9999999999999", java)
	harness.Do(t, s.Addr, "HSET", "app:rw", "mode", "read", java, "1")
	harness.Do(t, s.Addr, "SET", wire.ReadHoldTimeout("app:rw", java, 1), "1", "PX", "3600000")
	harness.Do(t, s.Addr, "SADD", wire.WriterWaits("app:rw"), java)
	c := harness.Client(t, s)
	mustLock(t, c.PlainLock("app:plain"), lock.Lease(time.Hour))
	_, err := c.PermitSemaphore("app:permits", semaphore.Permits(3)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
	require.NoError(t, err)
	_, err = c.CountDownLatch("app:latch").TrySetCount(t.Context(), 2)
	require.NoError(t, err)
	return []string{"app:lock", "app:fair", "app:rw", "app:plain", "app:permits", "app:latch", run}
}

// The documented rights of operators are enough for each command.
func TestRightsOfOperators(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		names := given(t, s)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")

		addr := operator(t, s, operatorRights(t))
		require.NotContains(t, succeeds(t, addr, append([]string{"inspect", "--json"}, names...)...), `"subscribers":-1`)
		require.Equal(t, statusNo, finish(t, addr, "doctor", "app:lock").status) // it has no expiry
		operator(t, s, operatorRights(t, "`ls`"))
		require.Equal(t, len(names)+1, strings.Count(succeeds(t, addr, "ls", "--all"), "\n"))
		succeeds(t, addr, "once", "ls")
		used := harness.Commands(t, harness.Conn(t, s.Addr))
		for _, word := range operatorRights(t, "`ls`") {
			command, _, _ := strings.Cut(strings.TrimPrefix(word, "+"), "|")
			if strings.HasPrefix(word, "+") {
				require.Positive(t, used[command], "nothing needs %s", word)
			}
		}

		id := strings.Repeat("0", 32)
		for _, row := range []struct {
			rows     []string
			commands []string
		}{
			{[]string{"`permits`"}, []string{
				"permits set app:permits 4", "permits drain app:permits", "permits set --plain app:plain-permits 4",
				"permits drain --plain app:plain-permits", "permits release --plain app:plain-permits 4",
			}},
			{[]string{"`permits`", "`ls`"}, []string{"permits set --force app:perm* 4"}},
			{[]string{"`latch`"}, []string{
				"latch down app:latch 2", "latch wait app:latch", "latch set --ttl 1h app:latch 1", "latch delete app:latch",
			}},
			{[]string{"`once done`"}, []string{
				"once done app:report 2", "once done --remember 48h app:report 2", "once forget app:report 2",
			}},
			{[]string{"`token`"}, []string{"token raise app:token 100"}},
			{[]string{"`unlock`"}, []string{
				"unlock --force app:lock", "unlock --force app:rw", "unlock --force app:plain", "unlock --force " + names[6],
			}},
			{[]string{"`unlock`", "`unlock` of"}, []string{"unlock --force app:fair"}},
		} {
			operator(t, s, operatorRights(t, row.rows...))
			for _, command := range row.commands {
				succeeds(t, addr, strings.Fields(command)...)
			}
		}
		operator(t, s, operatorRights(t, "`permits`"))
		fails(t, addr, statusNo, "not held", "permits", "release", "app:permits", id)
	})
}

// An error names the keys to which the user has no access, and a warning the channel. The server names neither.
func TestErrorsNameDeniedKeys(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		given(t, s)
		without := func(rights []string, words ...string) (addr string) {
			return operator(t, s, slices.DeleteFunc(rights, func(word string) bool { return slices.Contains(words, word) }))
		}

		addr := without(operatorRights(t), "~{app:*")
		fails(t, addr, statusFailed, `read "app:lock": `, "inspect", "app:lock")
		fails(t, addr, statusFailed, "the user may not access the keys {app:lock}:timeout, {app:lock}:permits\n", "inspect", "app:lock")
		all := []string{"~red*{app:*", "~app:*", "~{app:*"}
		locks := []string{"+hset", "+hexists", "+hkeys", "+hrandfield", "+hdel", "+pexpire", "+del", "+incr", "+publish", "+get"}
		for _, row := range []struct{ row, command, denied string }{
			{"`permits`", "permits set app:permits 4", "keys redlatch_sc_request:{app:permits}:*, redlatch_sc_request:{app:permits}:created, "},
			{"`latch`", "latch set app:new 4", "keys redlatch_latch_round:{app:new}:*, redlatch_latch_round:{app:new}\n"},
			{"`once done`", "once done app:report 3", "key redlatch_once_done:{app:report}:3\n"},
			{"`token`", "token raise app:token 3", "key redisson_lock_token:{app:token}\n"},
			{"`unlock`", "unlock --force app:lock", "keys redisson_lock_token:{app:lock}, "},
			{"`permits`", "lock --kind fenced app:token -- true", "key redisson_lock_token:{app:token}\n"},
			{"`permits`", "lock --permits 2 app:permits -- true", "keys redlatch_sc_request:{app:permits}:*, "},
		} {
			// once forget and once done have one key: the other keys of the slot are of the lock of the run.
			more := []string{}
			if row.row == "`once done`" {
				more = append(more, "~redlatch_once:{app:*")
			}
			addr := without(append(append(operatorRights(t, row.row), locks...), more...), all[0])
			fails(t, addr, statusFailed, "the user may not access the "+row.denied, strings.Fields(row.command)...)
		}
		fails(t, without(operatorRights(t), all...), statusFailed, "the user may not access the keys app:lock, ", "inspect", "app:lock")

		// The server names a command itself, except in scripts of Redis before 7.2.
		fails(t, without(operatorRights(t, "`ls`"), "+scan"), statusFailed, "'scan'", "ls")

		addr = without(operatorRights(t, "`latch`"), "&redisson_countdownlatch__channel__{app:*")
		r := finish(t, addr, "latch", "wait", "--wait", "3s", "app:latch")
		require.Equal(t, statusNotAcquired, r.status, r.stderr)
		require.Contains(t, r.stderr, "channel=redisson_countdownlatch__channel__{app:latch}")
	})
}
