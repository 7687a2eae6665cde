package wire

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rests are what follows a name in the keys of some roles.
var rests = map[Role]string{
	RoleFairChannel: client + ":42", RoleReadHold: client + ":42:rwlock_timeout:2", RoleSemaphoreRequests: client,
	RoleLatchReply: strings.Repeat("0f", 16), RoleOnceRun: "a%3Ab+c", RoleOnceDone: "a%3Ab+c",
	RoleRateValueOf: client, RoleRateReply: strings.Repeat("0f", 16), RoleRatePermitsOf: client,
}

// keyOf returns a key of a role.
func keyOf(role Role, name string) string { return Forms[role].Of(name) + rests[role] }

// Each key leads back to its object, whatever the name and the slot.
func TestParseKey(t *testing.T) {
	o := owner(t)
	require.Equal(t, FairChannel("jobs", o), keyOf(RoleFairChannel, "jobs"))
	require.Equal(t, ReadHoldTimeout("jobs", o.String(), 2), keyOf(RoleReadHold, "jobs"))
	require.Equal(t, SemaphoreRequests("jobs", client), keyOf(RoleSemaphoreRequests, "jobs"))
	require.Equal(t, OnceRun("jobs", "a:b c"), keyOf(RoleOnceRun, "jobs"))
	require.Equal(t, OnceDone("jobs", "a:b c"), keyOf(RoleOnceDone, "jobs"))
	for _, name := range []string{"jobs", "a:b", "{a}b", "b{a}", "a{b}c", "a}b", "{", "a\nb", "\xff"} {
		for role := range numRoles {
			key := keyOf(role, name)
			k, ok := ParseKey(key)
			require.True(t, ok, key)
			require.Equal(t, Key{role, name, rests[role]}, k, key)
			slot, isOnce := k.Slot()
			require.Equal(t, role == RoleOnceRun || role == RoleOnceDone, isOnce)
			if isOnce {
				require.Equal(t, "a:b c", slot)
			}
		}
		k, ok := ParseKey(OnceRun(name, name))
		require.True(t, ok, name)
		slot, ok := k.Slot()
		require.True(t, ok)
		require.Equal(t, []string{name, name}, []string{k.Name, slot})
	}

	// The lock of a run has a channel.
	for _, name := range []string{"jobs", "{a}b"} {
		k, ok := ParseKey(LockChannel(OnceRun(name, "x")))
		require.True(t, ok)
		require.Equal(t, Key{RoleLockChannel, OnceRun(name, "x"), ""}, k)
	}

	// These two share their keys.
	k, ok := ParseKey(FencingToken("{a}"))
	require.True(t, ok)
	require.Equal(t, "a", k.Name)

	for _, key := range []string{
		"", "jobs", "{jobs}", "redlatch_once:{jobs}", "redlatch_once:{jobs}:", "redlatch_once:{}:x",
		"redlatch_once_done:jobs:x", "{jobs}:timeouts", "redlatch_sc_request:{jobs}:x", ServerMark,
	} {
		k, ok := ParseKey(key)
		require.False(t, ok, "%q: %v", key, k)
	}
	k, ok = ParseKey("redlatch_once:{jobs}:%zz")
	require.True(t, ok)
	_, ok = k.Slot()
	require.False(t, ok)
}

func TestOnceDoneValue(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_123)
	by, when := ParseOnceDone(OnceDoneValue(owner(t), at))
	require.Equal(t, owner(t).String(), by)
	require.Equal(t, at, when)
	for _, value := range []string{"", "x", "x y", "x 1 2"} {
		by, when = ParseOnceDone(value)
		require.Equal(t, strings.TrimSpace(strings.Split(value, " ")[0]), by)
		require.True(t, when.IsZero(), value)
	}
}
