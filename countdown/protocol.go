package countdown

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

var (
	//go:embed count.lua
	countLua string
	//go:embed try_set_count.lua
	trySetCountLua string
	//go:embed count_down.lua
	countDownLua string
	//go:embed delete.lua
	deleteLua string
	//go:embed look.lua
	lookLua string

	trySetCountScript = wire.NewScript(countLua + trySetCountLua)
	countDownScript   = wire.NewScript(countLua + countDownLua)
	deleteScript      = wire.NewScript(countLua + deleteLua)
	lookScript        = wire.NewScript(lookLua)
)

// What is published: that a round has ended, and that one was set or deleted.
const (
	payloadOpen = wire.PayloadLatchOpen
	payloadSet  = wire.PayloadLatchShut
)

// roundLife is for how long the identity of a round is kept. It is compared by who has
// waited since before the round began, and has not looked since: within the time of a
// safety poll, or of an outage.
const roundLife = time.Hour

// look asks the server for the state of a latch.
func look(ctx context.Context, c rueidis.Client, key string) (sight, error) {
	reply, err := lookScript.Exec(ctx, c, []string{key, wire.LatchRound(key)}, nil).ToArray()
	if err != nil {
		return sight{}, err
	}
	if len(reply) != 3 {
		return sight{}, errAnswer
	}
	text, err := reply[0].ToString()
	if rueidis.IsRedisNil(err) {
		return sight{}, nil
	}
	ttl, err2 := reply[1].AsInt64()
	round, err3 := reply[2].ToString()
	if rueidis.IsRedisNil(err3) {
		err3 = nil
	}
	if errors.Join(err, err2, err3) != nil {
		return sight{}, errAnswer
	}
	count, err := parseCount(text)
	return sight{count: count, ttl: time.Duration(ttl) * time.Millisecond, round: round}, err
}

var (
	errAnswer = errors.New("the server's answer has the wrong form")
	// errNoCount is for a key that holds no number: it is no latch.
	errNoCount = errors.New("the key holds no count")
)

// mayPass reports whether a look that failed may succeed later.
func mayPass(err error) bool {
	return wire.OutcomeOf(err) != wire.Refused && !errors.Is(err, errNoCount) && !errors.Is(err, errAnswer)
}

// parseCount returns the count that is to come down. Only what the server itself takes
// for a number is one.
func parseCount(text string) (int64, error) {
	count, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(count, 10) != text {
		return 0, fmt.Errorf("%w: %.40q", errNoCount, text)
	}
	return max(count, 0), nil
}
