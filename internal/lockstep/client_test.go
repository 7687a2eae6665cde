package lockstep

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/wire"
)

func TestVirtualClock(t *testing.T) {
	c := Connect(t, miniredis.RunT(t).Addr(), 1)
	c.Reset(5_000)
	do := func(command string, reply any) {
		t.Helper()
		real, err := c.Do(context.Background(), c.B().Arbitrary(strings.Fields(command)...).Build()).ToAny()
		if !rueidis.IsRedisNil(err) {
			require.NoError(t, err, command)
		}
		require.Equal(t, fmt.Sprint(reply), fmt.Sprint(real), command)
	}
	do("SET stays x PX 10", "OK")
	do("PERSIST stays", 1)
	do("SET text y PX 1000", "OK")
	do("HSET hash a 1 b 2", 2)
	do("PEXPIRE hash 300", 1)
	do("RPUSH list y x", 2)
	do("SADD set m n", 2)
	do("ZADD zset 1 p -1 q", 2)
	do("PUBLISH channel hello", Subscribers)
	c.Wait(5_300)
	do("PTTL hash", 0)
	do("PTTL text", 700)
	do("PTTL stays", -1)
	do("PTTL nothing", -2)
	do("TIME", []string{"5", "300999"})

	want := State{Told: []string{"channel hello"}}
	want.Put("stays", "string", 0, "x")
	want.Put("text", "string", 6_000, "y")
	want.Put("hash", "hash", 5_300, "b", "2", "a", "1")
	want.Put("list", "list", 0, "y", "x")
	want.Put("set", "set", 0, "n", "m")
	want.Put("zset", "zset", 0, "q", "-1", "p", "1")
	want.Put("empty", "set", 0)
	c.Compare(want)
	require.ErrorContains(t, c.State().differ(want), "hello", "a message is reported once")

	c.Wait(5_301)
	do("EXISTS hash text", 1)
	do("HGET hash a", nil)
	do("PEXPIRE hash 5", 0)
	do("HSET hash a 3", 1)
	do("PTTL hash", -1) // the hash is new
	do("HDEL hash a", 1)
	do("HSET hash a 4", 1)
	do("SET text z", "OK")
	do("PTTL text", -1)
	do("DEL text list nothing", 2)
	do("PEXPIRE set 0", 1)
	delete(want.Keys, "text")
	delete(want.Keys, "list")
	delete(want.Keys, "set")
	want.Put("hash", "hash", 0, "a", "4")
	want.Told = nil
	c.Compare(want)
	want.Put("zset", "zset", 7_000, "q", "0")
	require.ErrorContains(t, c.State().differ(want), `want "zset q=0" until 7000`)
}

// The server already knows the original script.
func TestScriptsUseVirtualClock(t *testing.T) {
	ctx, s := context.Background(), miniredis.RunT(t)
	script := wire.NewScript(`
		redis.call('SET', KEYS[1], redis.call('TIME')[1], 'PX', ARGV[1])
		local n = redis.pcall('INCRBY', KEYS[1], 1)
		return type(n) == 'table' and n.err or 'done'`)
	plain, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr()}, DisableCache: true})
	require.NoError(t, err)
	defer plain.Close()
	require.NoError(t, script.Exec(ctx, plain, []string{"real"}, []string{"1"}).Error())

	c := Connect(t, s.Addr(), 1)
	c.Reset(5_000)
	want := State{}
	for range 2 {
		for _, reply := range script.ExecMany(ctx, c, []wire.Call{{Keys: []string{"key"}, Args: []string{"70"}}}, true) {
			require.NoError(t, reply.Error())
		}
		want.Put("key", "string", 5_070, "6")
		c.Compare(want)
	}
	c.Denied = "INCRBY"
	reply, err := script.Exec(ctx, c, []string{"key"}, []string{"80"}).ToString()
	require.NoError(t, err)
	require.Contains(t, reply, "NOPERM")
	want.Put("key", "string", 5_080, "5")
	c.Compare(want)
}
