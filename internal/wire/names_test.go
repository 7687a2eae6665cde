package wire

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

const client = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"

func owner(t *testing.T) lock.Owner {
	t.Helper()
	o, err := lock.NewOwner(client, 42)
	require.NoError(t, err)
	return o
}

func TestNames(t *testing.T) {
	o := owner(t)
	kinds := []struct {
		kind   string
		of     func(name string) string
		plain  string // for "orders"
		braced string // for "{shop}orders"
	}{
		{"lock channel", LockChannel, "redisson_lock__channel:{orders}", "redisson_lock__channel:{shop}orders"},
		{"fencing token", FencingToken, "redisson_lock_token:{orders}", "redisson_lock_token:{shop}orders"},
		{"fair queue", FairQueue, "redisson_lock_queue:{orders}", "redisson_lock_queue:{shop}orders"},
		{"fair timeouts", FairTimeouts, "redisson_lock_timeout:{orders}", "redisson_lock_timeout:{shop}orders"},
		{"fair channel", func(n string) string { return FairChannel(n, o) },
			"redisson_lock__channel:{orders}:" + client + ":42", "redisson_lock__channel:{shop}orders:" + client + ":42"},
		{"read-write channel", RWChannel, "redisson_rwlock:{orders}", "redisson_rwlock:{shop}orders"},
		{"read hold timeout", func(n string) string { return ReadHoldTimeout(n, o.String(), 2) },
			"{orders}:" + client + ":42:rwlock_timeout:2", "{shop}orders:" + client + ":42:rwlock_timeout:2"},
		{"semaphore channel", SemaphoreChannel, "redisson_sc:{orders}", "redisson_sc:{shop}orders"},
		{"permit timeouts", PermitTimeouts, "{orders}:timeout", "{shop}orders:timeout"},
		{"latch channel", LatchChannel,
			"redisson_countdownlatch__channel__{orders}", "redisson_countdownlatch__channel__{{shop}orders}"},
		{"latch round", LatchRound, "redlatch_latch_round:{orders}", "redlatch_latch_round_tagged:{shop}orders"},
		{"plain channel", PlainChannel, "redlatch_plain__channel:{orders}", "redlatch_plain__channel_tagged:{shop}orders"},
		{"waiting writers", WriterWaits, "redlatch_rwlock_writer:{orders}", "redlatch_rwlock_writer_tagged:{shop}orders"},
		{"permits of a rate", RateValue, "{orders}:value", "{shop}orders:value"},
		{"entries of a rate", RatePermits, "{orders}:permits", "{shop}orders:permits"},
		{"permits of a client", func(n string) string { return RateValueOf(n, client) },
			"{orders}:value:" + client, "{shop}orders:value:" + client},
		{"entries of a client", func(n string) string { return RatePermitsOf(n, client) },
			"{orders}:permits:" + client, "{shop}orders:permits:" + client},
		{"turn", RateTurn, "redlatch_rl_turn:{orders}", "redlatch_rl_turn_tagged:{shop}orders"},
		{"reply to a release", func(n string) string { return RateReply(n, "1") },
			"redlatch_rl_reply:{orders}:1", "redlatch_rl_reply_tagged:{shop}orders:1"},
		{"rate channel", RateChannel, "redlatch_rl__channel:{orders}", "redlatch_rl__channel_tagged:{shop}orders"},
		{"wait queue", SemaphoreWaiting, "redlatch_sc_waiting:{orders}", "redlatch_sc_waiting_tagged:{shop}orders"},
		{"clients in the wait queue", SemaphoreAlive, "redlatch_sc_alive:{orders}", "redlatch_sc_alive_tagged:{shop}orders"},
		{"election", ElectionTerm, "redlatch_election:{orders}", "redlatch_election_tagged:{shop}orders"},
		{"election channel", ElectionChannel, "redlatch_election__channel:{orders}", "redlatch_election__channel_tagged:{shop}orders"},
	}
	for _, k := range kinds {
		t.Run(k.kind, func(t *testing.T) {
			assert.Equal(t, k.plain, k.of("orders"))
			assert.Equal(t, k.braced, k.of("{shop}orders"))
		})
	}
	assert.Equal(t, client+":42:write", WriteOwner(o))
}

func TestNamesShareSlot(t *testing.T) {
	for _, name := range []string{"orders", "{shop}orders", "a b", "x:y:z", "ключ", "a{b}c", "{a}{b}", "a}b{c}"} {
		if CheckName(name, true) != nil {
			continue
		}
		for role := range numRoles {
			key := keyOf(role, name)
			// The channel of a latch adds braces, so only some names are valid.
			if role != RoleLatchChannel || CheckLatchName(name, true, true) == nil {
				assert.Equal(t, Slot(name), Slot(key), key)
			}
		}
	}
}

func TestCheckName(t *testing.T) {
	tests := []struct {
		name        string
		ok, latchOK bool
	}{
		{"orders", true, true},
		{"a:b:c", true, true},
		{"{a}b", true, false},
		{"b{a}", true, false},
		{"a{b}c", true, false},
		{"a}b{c}", true, false},
		{"", false, false},
		{"a{b", false, false},
		{"a{}b", false, false},
		{"x}y", false, false},
		{"}a", false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			check := func(err error, ok bool) {
				if ok {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, lock.ErrInvalid)
				}
			}
			check(CheckName(tt.name, true), tt.ok)
			check(CheckName(tt.name, false), tt.name != "")
			check(CheckLatchName(tt.name, true, true), tt.latchOK)
			check(CheckLatchName(tt.name, true, false), tt.ok)
			check(CheckLatchName(tt.name, false, false), tt.name != "")
		})
	}
}

// No key of an object whose name is accepted has a name that is accepted, and no two names that are
// share a key.
func TestCheckStrictly(t *testing.T) {
	for _, name := range []string{"orders", "a:b", "{a}b", "b{a}", "a{b}c", "{a}{b}", "{", "orders:timeout", "{a}:values", "orders:value", strings.Repeat("x", 512)} {
		require.NoError(t, CheckStrictly(name), name)
		keys := []string{ServerMark}
		for role := range numRoles {
			keys = append(keys, keyOf(role, name))
		}
		for _, key := range keys {
			require.ErrorIs(t, CheckStrictly(key), lock.ErrInvalid, key)
		}
	}
	for _, name := range []string{"{a}", "{a:b}", strings.Repeat("x", 513)} {
		require.ErrorIs(t, CheckStrictly(name), lock.ErrInvalid, name)
	}
}

func TestSlot(t *testing.T) {
	// The first is the check value of the cluster specification; the others are replies
	// of CLUSTER KEYSLOT.
	assert.Equal(t, 0x31C3, Slot("123456789"))
	assert.Equal(t, Slot("user1000"), Slot("{user1000}.following"))
	assert.Equal(t, 15495, Slot("{a}b"))
	assert.Equal(t, 10276, Slot("redisson_countdownlatch__channel__{{a}b}"))
}

func TestRequestID(t *testing.T) {
	a, b := NewRequestID(), NewRequestID()
	assert.Regexp(t, "^[0-9a-f]{32}$", a)
	assert.NotEqual(t, a, b)
}

func TestMillisRoundsUp(t *testing.T) {
	assert.Equal(t, "1", Millis(time.Millisecond))
	assert.Equal(t, "2", Millis(time.Millisecond+1))
	assert.Equal(t, "30000", Millis(30*time.Second))
}
