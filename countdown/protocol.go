package countdown

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	trySetCountScript = wire.LoadScript(luaFiles, "count", "try_set_count")
	countDownScript   = wire.LoadScript(luaFiles, "count", "count_down")
	deleteScript      = wire.LoadScript(luaFiles, "count", "delete")
	cancelScript      = wire.LoadScript(luaFiles, "cancel")
	readScript        = wire.LoadScript(luaFiles, "read")
)

// Payloads of the messages: a round has ended, or one was set or deleted.
const (
	payloadOpen = wire.PayloadLatchOpen
	payloadSet  = wire.PayloadLatchShut
)

// roundTTL is the time to live of a round id. A waiter compares the id with that of its
// previous read, which is at most a poll interval or an outage old.
const roundTTL = time.Hour

// replyTTL is the time to live of a cached reply. Within that time a request without one
// has had no effect.
const replyTTL = 30 * time.Second

// cachedReply is the key that caches the reply of a request.
func cachedReply(key, request string) string { return wire.LatchRound(key) + ":" + request }

// read returns the state of a latch.
func read(ctx context.Context, c rueidis.Client, key string) (snapshot, error) {
	reply, err := readScript.Exec(ctx, c, []string{key, wire.LatchRound(key)}, nil).ToArray()
	if err != nil {
		return snapshot{}, err
	}
	if len(reply) != 3 {
		return snapshot{}, errReply
	}
	text, err := reply[0].ToString()
	if rueidis.IsRedisNil(err) {
		return snapshot{}, nil
	}
	ttl, err2 := reply[1].AsInt64()
	round, err3 := reply[2].ToString()
	if rueidis.IsRedisNil(err3) {
		err3 = nil
	}
	if errors.Join(err, err2, err3) != nil {
		return snapshot{}, errReply
	}
	count, err := parseCount(text)
	return snapshot{count: count, ttl: time.Duration(ttl) * time.Millisecond, round: round}, err
}

var (
	errReply = errors.New("unexpected reply from the server")
	// errTooLate means that the server may have dropped the cached reply.
	errTooLate = errors.New("the server answered too late")
	// errNoCount means that the key holds something other than a count.
	errNoCount = errors.New("the key does not hold a count")
)

// temporary reports whether a failed read may succeed later.
func temporary(err error) bool {
	return wire.OutcomeOf(err) != wire.Refused && !errors.Is(err, errNoCount) && !errors.Is(err, errReply)
}

// parseCount returns the count, 0 if it is negative. It accepts only what the server
// itself accepts as an integer.
func parseCount(text string) (int64, error) {
	count, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(count, 10) != text {
		return 0, fmt.Errorf("%w: %.40q", errNoCount, text)
	}
	return max(count, 0), nil
}
