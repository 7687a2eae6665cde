package wire

import (
	"context"
	"crypto/sha1" // the server names scripts by their SHA-1
	"encoding/hex"
	"strconv"
	"time"

	"github.com/redis/rueidis"
)

// Script is a Lua script, sent by its SHA-1 and in full only where the server
// does not have it. It is never resent after any other error: a script whose
// reply was lost may have run.
type Script struct {
	source string
	sha    string
}

// NewScript prepares a script. It sends nothing.
func NewScript(source string) *Script {
	sum := sha1.Sum([]byte(source))
	return &Script{source: source, sha: hex.EncodeToString(sum[:])}
}

// Exec runs the script on the server that has keys, on a connection shared
// with the client's other commands, and blocks for its reply. All keys are of
// one slot.
func (s *Script) Exec(ctx context.Context, c rueidis.Client, keys, args []string) rueidis.RedisResult {
	n := int64(len(keys))
	resp := c.Do(ctx, c.B().Evalsha().Sha1(s.sha).Numkeys(n).Key(keys...).Arg(args...).Build())
	if isNoScript(resp) {
		resp = c.Do(ctx, c.B().Eval().Script(s.source).Numkeys(n).Key(keys...).Arg(args...).Build())
	}
	return resp
}

// ExecApart is Exec on a connection that no other command uses meanwhile,
// taken from the pool that rueidis keeps for blocking commands: a flood of
// commands cannot delay it. ctx should have a deadline.
func (s *Script) ExecApart(ctx context.Context, c rueidis.Client, keys, args []string) rueidis.RedisResult {
	n := strconv.Itoa(len(keys))
	resp := c.Do(ctx, c.B().Arbitrary("EVALSHA", s.sha, n).Keys(keys...).Args(args...).Blocking())
	if isNoScript(resp) {
		resp = c.Do(ctx, c.B().Arbitrary("EVAL", s.source, n).Keys(keys...).Args(args...).Blocking())
	}
	return resp
}

func isNoScript(resp rueidis.RedisResult) bool {
	err, ok := rueidis.IsRedisErr(resp.Error())
	return ok && err.IsNoScript()
}

// Millis is a duration as scripts take it: whole milliseconds, rounded up so
// that a lease on the server never ends before the one counted here.
func Millis(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}
