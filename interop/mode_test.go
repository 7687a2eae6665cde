package interop

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/pubsub"
)

// modes are the settings of Redisson that correspond to those of redlatch.
var modes = map[string]pubsub.Mode{"ON": pubsub.Sharded, "OFF": pubsub.Plain}

// eachMode runs a test on a cluster for each mode and with every version of Redisson that has
// the setting.
func eachMode(t *testing.T, test func(t *testing.T, p *env, setting string, java side)) {
	t.Helper()
	ofRedis(t)
	servers := cluster(t)
	for _, version := range []string{newest, before} {
		p := at(t, version, servers...)
		for setting := range modes {
			t.Run(fmt.Sprintf("Redisson %s, %s", version, setting), func(t *testing.T) {
				t.Parallel()
				java := javaSide{p.theirs(t, fmt.Sprintf("  shardedSubscriptionMode: %q", setting))}
				t.Run("objects", func(t *testing.T) { test(t, p, setting, java) })
			})
		}
	}
}

// heard waits until that many clients are subscribed to channels with that prefix, by either
// kind of pub/sub.
func (p *env) heard(t testing.TB, sharded bool, channel string, clients int) {
	t.Helper()
	list, count := "CHANNELS", "NUMSUB"
	if sharded {
		list, count = "SHARDCHANNELS", "SHARDNUMSUB"
	}
	harness.Eventually(t, answers, strconv.Itoa(clients)+" subscribers of "+channel, func() bool {
		sum := 0
		for _, addr := range p.addrs() {
			channels, err := testserver.Query(addr, "PUBSUB", list, channel+"*")
			require.NoError(t, err)
			if len(channels) == 0 {
				continue
			}
			counts, err := testserver.Query(addr, append([]string{"PUBSUB", count}, channels...)...)
			require.NoError(t, err)
			for i := 1; i < len(counts); i += 2 {
				n, err := strconv.Atoi(counts[i])
				require.NoError(t, err)
				sum += n
			}
		}
		return sum == clients
	})
}

// channelOf returns the channel of a lock's releases, or its prefix.
func channelOf(kind, name string) string {
	switch kind {
	case "read", "write":
		return wire.RWChannel(name)
	}
	return wire.LockChannel(name)
}

func TestPubSubModesMatch(t *testing.T) {
	eachMode(t, func(t *testing.T, p *env, setting string, java side) {
		ours := goSide{p.ours(t, redlatch.WithPubSubMode(modes[setting])), false}
		sharded := setting == "ON"
		for _, s := range []pair{{ours, java}, {java, ours}} {
			t.Run(s.first.String()+", then "+s.second.String(), func(t *testing.T) {
				for _, kind := range []string{"lock", "fenced", "fair", "read", "write", "non-reentrant", "non-reentrant fair"} {
					if !has(p.version, kind) {
						continue
					}
					name := fmt.Sprint("orders of ", t.Name(), kind)
					held, theirs := s.first.lock(kind, name), s.second.lock(rival(kind), name)
					held.take(t, 1, 0, long).gets(t, answers)
					tried := p.watch(t, name)
					waiting := theirs.take(t, 1, forever, long)
					tried.asleep(t, s.second, 1)
					p.heard(t, sharded, channelOf(kind, name), 1)
					p.heard(t, !sharded, channelOf(kind, name), 0)
					began := time.Now()
					require.NoError(t, held.release(t, 1))
					promptly(t, began, waiting.gets(t, answers))
					require.NoError(t, theirs.release(t, 1))
				}
				for _, kind := range pools {
					name := fmt.Sprint("orders of ", t.Name(), kind)
					mine, theirs := poolOf(s.first, kind, name), poolOf(s.second, kind, name)
					require.True(t, mine.set(t, 1))
					held := mine.take(t, 1, 0, long)
					held.gets(t, answers)
					tried := p.watch(t, name)
					waiting := theirs.take(t, 1, forever, long)
					tried.asleep(t, s.second, 1)
					p.heard(t, sharded, wire.SemaphoreChannel(name), 1)
					began := time.Now()
					require.NoError(t, mine.give(t, 1, held.ids...))
					promptly(t, began, waiting.gets(t, answers))
				}
				name := fmt.Sprint("orders of ", t.Name())
				mine, theirs := latchOf(s.first, name), latchOf(s.second, name)
				require.True(t, mine.set(t, 1))
				waiting := theirs.wait(t, forever)
				p.heard(t, sharded, wire.LatchChannel(name), 1)
				began := time.Now()
				mine.down(t)
				promptly(t, began, waiting.gets(t, answers))
			})
		}
	})
}

// safetyPoll is the interval at which our waiters poll.
const safetyPoll = 5 * time.Second

// Java's waiters have no such guarantee.
func TestOurWaitersAcquireDespiteAnotherMode(t *testing.T) {
	eachMode(t, func(t *testing.T, p *env, setting string, java side) {
		mode := pubsub.Sharded
		if setting == "ON" {
			mode = pubsub.Plain
		}
		ours := goSide{p.ours(t, redlatch.WithPubSubMode(mode)), false}
		p.eachKind(t, func(t *testing.T, kind, name string) {
			if kind == "spin" {
				return // it hears nothing anyway
			}
			held, theirs := java.lock(kind, name), ours.lock(rival(kind), name)
			held.take(t, 1, 0, long).gets(t, answers)
			waiting := theirs.take(t, 1, forever, long)
			p.heard(t, mode == pubsub.Sharded, channelOf(kind, name), 1)
			began := time.Now()
			require.NoError(t, held.release(t, 1))
			at := waiting.gets(t, 2*safetyPoll)
			require.LessOrEqual(t, at.Sub(began), safetyPoll+slack)
			require.NoError(t, theirs.release(t, 1))
		})
	})
}
