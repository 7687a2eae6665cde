package wire

import (
	"context"
	"crypto/fips140"
	"crypto/sha1" // the server names scripts by their SHA-1
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// Script is a Lua script, sent by its SHA-1 and in full only where the server
// does not have it, or where FIPS 140-3 mode forbids to compute that. It is
// never resent if it may have run.
type Script struct {
	source string
	sha    string
}

// NewScript prepares a script. It sends nothing.
func NewScript(source string) *Script {
	s := &Script{source: source}
	if !fips140.Enabled() { // there SHA-1 may be forbidden, also as a mere name
		sum := sha1.Sum([]byte(source))
		s.sha = hex.EncodeToString(sum[:])
	}
	return s
}

// Exec runs the script on the server that has keys, on a connection shared
// with the client's other commands, and blocks for its reply. All keys are of
// one slot.
func (s *Script) Exec(ctx context.Context, c rueidis.Client, keys, args []string) rueidis.RedisResult {
	ctx = Shared(ctx)
	n := int64(len(keys))
	if s.sha != "" {
		resp := unlessCancelledElsewhere(ctx, func() rueidis.RedisResult {
			return c.Do(ctx, c.B().Evalsha().Sha1(s.sha).Numkeys(n).Key(keys...).Arg(args...).Build())
		})
		if !isNoScript(resp) {
			return resp
		}
	}
	return unlessCancelledElsewhere(ctx, func() rueidis.RedisResult {
		return c.Do(ctx, c.B().Eval().Script(s.source).Numkeys(n).Key(keys...).Arg(args...).Build())
	})
}

// unlessCancelledElsewhere sends again what was not sent because another caller
// has left: rueidis connects under the context of whoever needs the connection
// first, and its end is the error of all who wait for it.
func unlessCancelledElsewhere(ctx context.Context, send func() rueidis.RedisResult) rueidis.RedisResult {
	const tries = 3
	for range tries - 1 {
		if resp := send(); ctx.Err() != nil || !errors.Is(resp.Error(), context.Canceled) {
			return resp
		}
	}
	return send()
}

// Read sends a command that only reads, to the primary, on a connection shared
// with others, and blocks for its reply. rueidis does not know it for one: on a
// borrowed client it would resend such commands until ctx ends, and might ask a
// replica.
func Read(ctx context.Context, c rueidis.Client, command, key string, args ...string) rueidis.RedisResult {
	ctx = Shared(ctx)
	return unlessCancelledElsewhere(ctx, func() rueidis.RedisResult {
		return c.Do(ctx, c.B().Arbitrary(command).Keys(key).Args(args...).Build())
	})
}

// Shared returns ctx for a command on a connection that others use too. rueidis
// takes the deadline of a context for one of the connection where nothing else
// is under way, and closes it when it passes, with whatever others have sent
// meanwhile. The context that is returned still ends then, but does not say
// when.
func Shared(ctx context.Context) context.Context {
	if _, ok := ctx.Deadline(); ok {
		return noDeadline{ctx}
	}
	return ctx
}

type noDeadline struct{ context.Context }

func (noDeadline) Deadline() (time.Time, bool) { return time.Time{}, false }

// Call is one execution of a script. Its keys are of one slot.
type Call struct{ Keys, Args []string }

// In how many stripes of slots ExecMany cuts what it sends to a cluster: on
// connections of their own, of which a node may get as many, and on the one that
// others use too.
const (
	stripesApart    = 12
	stripesTogether = 256
)

// ExecMany runs the script for every call and blocks until each has a reply or
// an error. With apart set they go over connections that no other command uses
// meanwhile, taken from the pool that rueidis keeps for blocking commands: a
// flood of commands cannot delay them. ctx should have a deadline.
func (s *Script) ExecMany(ctx context.Context, c rueidis.Client, calls []Call, apart bool) []rueidis.RedisResult {
	if !apart {
		ctx = Shared(ctx)
	}
	if c.Mode() == rueidis.ClientModeCluster {
		return s.execEach(ctx, c, calls, apart)
	}
	cmds := make(rueidis.Commands, len(calls))
	for i, call := range calls {
		cmds[i] = s.command(c, call, apart, s.sha == "")
	}
	replies := c.DoMulti(ctx, cmds...)
	var missing []int
	cmds = cmds[:0]
	for i, reply := range replies {
		if isNoScript(reply) {
			missing = append(missing, i)
			cmds = append(cmds, s.command(c, calls[i], apart, true))
		}
	}
	if len(missing) > 0 {
		for j, reply := range c.DoMulti(ctx, cmds...) {
			replies[missing[j]] = reply
		}
	}
	return replies
}

// execEach sends every call by itself. A slot that nobody serves fails
// everything that rueidis is given together with it, and a pipeline of blocking
// commands that ASK redirects makes it panic. The calls of a stripe of slots, which
// is mostly of one node, are sent one after the other, those of others meanwhile:
// a node that does not answer holds up its own.
func (s *Script) execEach(ctx context.Context, c rueidis.Client, calls []Call, apart bool) []rueidis.RedisResult {
	stripes := stripesTogether
	if apart {
		stripes = stripesApart
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
				replies[i] = c.Do(ctx, s.command(c, calls[i], apart, s.sha == ""))
				if isNoScript(replies[i]) {
					replies[i] = c.Do(ctx, s.command(c, calls[i], apart, true))
				}
			}
		})
	}
	done.Wait()
	return replies
}

// command runs the script by its name, or in full.
func (s *Script) command(c rueidis.Client, call Call, apart, inFull bool) rueidis.Completed {
	name, script := "EVALSHA", s.sha
	if inFull {
		name, script = "EVAL", s.source
	}
	cmd := c.B().Arbitrary(name, script, strconv.Itoa(len(call.Keys))).Keys(call.Keys...).Args(call.Args...)
	if apart {
		return cmd.Blocking()
	}
	return cmd.Build()
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

// Flag is a yes or no as scripts take it.
func Flag(yes bool) string {
	if yes {
		return "1"
	}
	return "0"
}

// Numbers reads a reply of n numbers.
func Numbers(reply rueidis.RedisResult, n int) ([]int64, error) {
	numbers, err := reply.AsIntSlice()
	if err == nil && len(numbers) != n {
		err = fmt.Errorf("redlatch: the server's answer has %d numbers, not %d", len(numbers), n)
	}
	if err != nil {
		return nil, err
	}
	return numbers, nil
}
