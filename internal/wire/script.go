package wire

import (
	"context"
	"crypto/fips140"
	"crypto/sha1" // identifies scripts on the server
	"embed"
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// Script is a Lua script. It is sent by its SHA-1, and in full if the server does not
// know it or FIPS 140-3 mode forbids SHA-1. A script that may have run is never resent.
type Script struct {
	source string
	sha    string
	atRest bool
}

// NewScript prepares a script. It sends nothing.
func NewScript(source string) *Script {
	s := &Script{source: source}
	if !fips140.Enabled() { // otherwise SHA-1 may be forbidden
		sum := sha1.Sum([]byte(source))
		s.sha = hex.EncodeToString(sum[:])
	}
	return s
}

// LoadScript prepares the script that consists of these files of the folder lua, one after
// the other.
func LoadScript(files embed.FS, names ...string) *Script { return NewScript(Source(files, names...)) }

// Source returns the text of these files of the folder lua, one after the other.
func Source(files embed.FS, names ...string) string {
	var source strings.Builder
	for _, name := range names {
		text, err := files.ReadFile("lua/" + name + ".lua")
		if err != nil {
			panic(err)
		}
		source.Write(text)
	}

	return source.String()
}

// AtRest makes a cluster refuse the script while the slot of its keys moves, with TRYAGAIN. A
// node that has only some keys of such a slot rejects a request if it lacks a declared key,
// but lets a script begin if it has all of them. The script would fail halfway at a key that it
// does not declare or has deleted, or take a key that is elsewhere for one that does not
// exist. So this declares one more key, which never exists. The last key that the caller
// declares must have a hash tag.
func (s *Script) AtRest() *Script {
	s.atRest = true
	return s
}

// Exec runs the script on the server that holds keys, on a shared connection, and
// blocks for its reply. All keys share a slot.
func (s *Script) Exec(ctx context.Context, c rueidis.Client, keys, args []string) rueidis.RedisResult {
	return s.exec(Shared(ctx), c, Call{keys, args}, false)
}

func (s *Script) exec(ctx context.Context, c rueidis.Client, call Call, dedicated bool) rueidis.RedisResult {
	reply := retryForeignCancel(ctx, func() rueidis.RedisResult {
		return c.Do(ctx, s.command(c, call, dedicated, s.sha == ""))
	})
	if isNoScript(reply) {
		reply = retryForeignCancel(ctx, func() rueidis.RedisResult {
			return c.Do(ctx, s.command(c, call, dedicated, true))
		})
	}
	return reply
}

// retryForeignCancel sends again if the cancellation of another caller has failed the
// request before it was sent: rueidis dials with the context of the first request that
// needs a connection, and returns that context's error to all requests that wait for
// it.
func retryForeignCancel(ctx context.Context, send func() rueidis.RedisResult) rueidis.RedisResult {
	const tries = 3
	for range tries - 1 {
		if resp := send(); ctx.Err() != nil || !errors.Is(resp.Error(), context.Canceled) {
			return resp
		}
	}
	return send()
}

// Read sends a read-only command to the primary on a shared connection and blocks for
// its reply. It is built such that rueidis does not recognize it as read-only: a
// borrowed client would resend it until ctx ends and might ask a replica. It is sent once more, on a new
// connection, if the connection is lost, as one may be that was idle.
func Read(ctx context.Context, c rueidis.Client, command, key string, args ...string) rueidis.RedisResult {
	ctx = Shared(ctx)
	send := func() rueidis.RedisResult {
		return retryForeignCancel(ctx, func() rueidis.RedisResult {
			return c.Do(ctx, c.B().Arbitrary(command).Keys(key).Args(args...).Build())
		})
	}
	reply := send()
	if IsUnknown(reply.NonRedisError()) && ctx.Err() == nil {
		reply = send()
	}
	return reply
}

// Shared returns ctx for a command on a shared connection. rueidis applies the deadline
// of a context to an idle connection and closes it when the deadline passes, with all
// requests sent meanwhile. The returned context ends at the same time but reports no
// deadline.
func Shared(ctx context.Context) context.Context {
	if _, ok := ctx.Deadline(); ok {
		return noDeadline{ctx}
	}
	return ctx
}

type noDeadline struct{ context.Context }

func (noDeadline) Deadline() (time.Time, bool) { return time.Time{}, false }

// Call is one execution of a script. Its keys share a slot.
type Call struct{ Keys, Args []string }

// The number of stripes into which ExecMany divides the slots of a cluster. Each stripe
// may use a dedicated connection per node.
const (
	stripesDedicated = 12
	stripesShared    = 256
)

// ExecMany runs the script for every call and blocks until each has a reply or an
// error. If dedicated is set, it uses connections without other traffic, from rueidis's
// pool for blocking commands, so that a flood of commands cannot delay the calls. ctx
// should have a deadline.
func (s *Script) ExecMany(ctx context.Context, c rueidis.Client, calls []Call, dedicated bool) []rueidis.RedisResult {
	if !dedicated {
		ctx = Shared(ctx)
	}
	if c.Mode() == rueidis.ClientModeCluster {
		return s.execEach(ctx, c, calls, dedicated)
	}

	cmds := make(rueidis.Commands, len(calls))
	for i, call := range calls {
		cmds[i] = s.command(c, call, dedicated, s.sha == "")
	}
	replies := c.DoMulti(ctx, cmds...)
	for i, reply := range replies {
		if isNoScript(reply) {
			replies[i] = c.Do(ctx, s.command(c, calls[i], dedicated, true))
		}
	}

	return replies
}

// execEach sends every call separately: in one pipeline, a slot without a server fails
// all calls, and rueidis panics if ASK redirects a pipeline of blocking commands. Calls
// of one stripe, which mostly belong to one node, are sent one after the other, and
// stripes concurrently, so that a node that does not answer delays only its own.
func (s *Script) execEach(ctx context.Context, c rueidis.Client, calls []Call, dedicated bool) []rueidis.RedisResult {
	stripes := stripesShared
	if dedicated {
		stripes = stripesDedicated
	}
	of := make(map[int][]int) // calls by stripe
	for i, call := range calls {
		n := Slot(call.Keys[0]) * stripes / slots
		of[n] = append(of[n], i)
	}
	replies := make([]rueidis.RedisResult, len(calls))
	var done sync.WaitGroup
	for _, stripe := range of {
		done.Go(func() {
			for _, i := range stripe {
				replies[i] = s.exec(ctx, c, calls[i], dedicated)
			}
		})
	}

	done.Wait()
	return replies
}

// command returns the command that runs the script, by its SHA-1 or in full.
func (s *Script) command(c rueidis.Client, call Call, dedicated, inFull bool) rueidis.Completed {
	name := "EVALSHA"
	script := s.sha
	if inFull {
		name = "EVAL"
		script = s.source
	}
	keys := call.Keys
	if s.atRest && c.Mode() == rueidis.ClientModeCluster {
		keys = append(slices.Clip(keys), keys[len(keys)-1]+neverSuffix)
	}
	cmd := c.B().Arbitrary(name, script, strconv.Itoa(len(keys))).Keys(keys...).Args(call.Args...)
	if dedicated {
		return cmd.Blocking()
	}

	return cmd.Build()
}

// neverSuffix makes a key that never exists from a key that the user may access.
const neverSuffix = ":never"

func isNoScript(resp rueidis.RedisResult) bool { return meaningOf(resp.Error()) == notCached }

// Millis formats a duration for scripts: whole milliseconds, rounded up so that a lease
// on the server does not end before the local one.
func Millis(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}

// Duration returns the duration of that many milliseconds in a reply. What a writer of the key makes too
// long for a duration is the longest, or the most negative.
func Duration(ms int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Millisecond)
	return time.Duration(max(-most, min(ms, most))) * time.Millisecond
}

// Flag formats a bool for scripts.
func Flag(yes bool) string {
	if yes {
		return "1"
	}
	return "0"
}
