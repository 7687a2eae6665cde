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

// On a cluster the sides wake each other if they have corresponding modes.
func TestPubSubModesMatch(t *testing.T) {
	harness.Full(t)
	t.Parallel()
	onCluster(t, func(t *testing.T, nodes []*testserver.Server) {
		for _, version := range []string{newest, before} { // the oldest has no such setting
			for setting, mode := range map[string]pubsub.Mode{"ON": pubsub.Sharded, "OFF": pubsub.Plain, "AUTO": pubsub.Auto} {
				t.Run(fmt.Sprintf("Redisson %s, %s", version, setting), func(t *testing.T) {
					t.Parallel()
					p := at(t, version, nodes...)
					java := javaSide{p.theirs(t, fmt.Sprintf("  shardedSubscriptionMode: %q", setting))}
					ours := goSide{p.ours(t, redlatch.WithPubSubMode(mode)), false}
					for i, s := range [][2]side{{ours, java}, {java, ours}} {
						wakes := func(name, channel string, release func(), wait func() *entry) {
							tried := p.watch(t, name)
							waiting := wait()
							tried.asleep(t, s[1], 1)
							p.heard(t, setting != "OFF", channel, 1)
							p.heard(t, setting == "OFF", channel, 0)
							began := time.Now()
							release()
							waiting.promptly(t, began)
						}
						for kind, channel := range map[string]func(string) string{
							"lock": wire.LockChannel, "fair": wire.LockChannel, "read": wire.RWChannel, "write": wire.RWChannel,
						} {
							name := fmt.Sprint("orders of ", t.Name(), i, kind)
							held, theirs := s[0].lock(kind, name), s[1].lock(rival(kind), name)
							held.take(t, 1, 0, long).gets(t, answers)
							wakes(name, channel(name),
								func() { require.NoError(t, held.release(t, 1)) },
								func() *entry { return theirs.take(t, 1, forever, long) })
							require.NoError(t, theirs.release(t, 1))
						}
						for _, kind := range pools {
							name := fmt.Sprint("orders of ", t.Name(), i, kind)
							mine, theirs := poolOf(t, s[0], kind, name), poolOf(t, s[1], kind, name)
							require.True(t, mine.set(1))
							held := mine.take(1, 0, long)
							held.gets(t, answers)
							wakes(name, wire.SemaphoreChannel(name),
								func() { require.NoError(t, mine.give(1, held.ids...)) },
								func() *entry { return theirs.take(1, forever, long).entry })
						}
						name := fmt.Sprint("orders of ", t.Name(), i)
						mine, theirs := latchOf(t, s[0], name), latchOf(t, s[1], name)
						require.True(t, mine.set(1))
						waiting := theirs.wait(forever)
						p.heard(t, setting != "OFF", wire.LatchChannel(name), 1)
						began := time.Now()
						mine.down()
						waiting.promptly(t, began)
					}
				})
			}
		}
	})
}
