package semaphore

import (
	"context"
	"embed"
	"errors"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript = script("pool", "acquire")
	undoScript    = script("pool", "undo")
	releaseScript = script("pool", "release")
	setScript     = script("pool", "set")
	addScript     = script("pool", "add")
	drainScript   = script("pool", "drain")
	leaveScript   = script("pool", "leave")

	permitAcquireScript = script("pool", "permits", "permit_acquire")
	permitUndoScript    = script("pool", "permits", "permit_undo")
	permitReleaseScript = script("pool", "permits", "permit_release")
	permitSetScript     = script("pool", "permits", "permit_set")
	permitCountsScript  = script("permit_counts")
	permitLeftScript    = script("permits", "permit_left")
	permitExtendScript  = script("permits", "permit_extend")
	permitRenewScript   = script("permit_renew")
)

// script returns the script that consists of these files of lua/, one after the other.
func script(names ...string) *wire.Script {
	var source strings.Builder
	for _, name := range names {
		text, err := luaFiles.ReadFile("lua/" + name + ".lua")
		if err != nil {
			panic(err)
		}
		source.Write(text)
	}
	return wire.NewScript(source.String())
}

const (
	// cacheTTL is how long the server keeps the reply to a request, and retryTime how long
	// the request is retried: the last attempt must arrive well before the reply expires.
	cacheTTL  = time.Minute
	retryTime = 45 * time.Second
	// undoTime is how long the undo of an acquisition is retried.
	undoTime = 5 * time.Minute
	// patience is how long a request is retried while the caller waits.
	patience = 5 * time.Second
	minPause = 20 * time.Millisecond
	maxPause = time.Second

	// bargingTime is how long a request waits before it joins the wait queue. Until then
	// younger requests may barge in, and no request waits for another process.
	bargingTime = 100 * time.Millisecond
	// maxHeartbeatTimeout bounds how long a dead client delays all others.
	maxHeartbeatTimeout = 3 * time.Second
)

// heartbeatTimeout returns how long after its last heartbeat a client keeps its position
// in the wait queue.
func (p *pool) heartbeatTimeout() time.Duration {
	return min(maxHeartbeatTimeout, p.s.WatchdogTimeout/3)
}

// exec runs a script that begins with pool.lua.
func (p *pool) exec(ctx context.Context, script *wire.Script, seq sequence, args []string) ([]int64, error) {
	keys := append(append(make([]string, 0, 2+len(p.otherKeys)), p.key, seq.key(p.key, p.s.ID)), p.otherKeys...)
	args = append(append(make([]string, 0, 4+len(args)), seq.String(), wire.Millis(cacheTTL), p.s.Publish, p.channel), args...)
	reply, err := script.Exec(ctx, p.s.Client, keys, args).AsIntSlice()
	if err == nil && len(reply) == 0 {
		err = errors.New("redlatch: the server has answered a later request")
	}
	return reply, err
}

// call sends a request that takes effect at most once, and retries it until the server
// answers, ctx is done, or patience runs out. An error that matches lock.ErrIndeterminate
// means that the request may have taken effect, or may still do so.
func (p *pool) call(ctx context.Context, script *wire.Script, args ...string) ([]int64, error) {
	reply, outcome, err := p.retry(ctx, p.slots.next(), patience, script, args)
	if outcome == wire.Unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return reply, err
}

// retry is call for a given sequence number and patience. Along with an error it returns
// the outcome of all attempts together.
func (p *pool) retry(ctx context.Context, seq sequence, patience time.Duration, script *wire.Script, args []string) ([]int64, wire.Outcome, error) {
	known := wire.Passing
	began := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		closed := p.s.Err() // makes this attempt the last
		attemptCtx, cancel := p.s.Bounded(ctx)
		reply, err := p.exec(attemptCtx, script, seq, args)
		cancel()
		if err == nil {
			p.slots.done(seq)
			return reply, wire.Refused, nil
		}
		outcome := wire.OutcomeOf(err)
		switch {
		case outcome == wire.Unknown:
			known = wire.Unknown
		case outcome == wire.Refused && known != wire.Unknown:
			p.slots.done(seq)
			return nil, wire.Refused, err
		}
		switch {
		case closed != nil:
			return nil, known, errors.Join(closed, err)
		case outcome == wire.Refused || time.Since(began)+pause > patience, time.Now().After(seq.until):
			return nil, known, err
		}
		select {
		case <-time.After(pause):
		case <-p.s.Done():
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return nil, known, errors.Join(context.Cause(ctx), err)
		}
	}
}

// background runs f, which retries a request for as long as patience says, in the
// background. While the client is closing f has time for one more attempt.
func (p *pool) background(f func(ctx context.Context, patience time.Duration)) {
	started := p.s.Go(func(ctx context.Context) {
		late, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(maxPause, cancel) })()
		f(late, retryTime)
	})
	if !started {
		ctx, cancel := context.WithTimeout(context.Background(), maxPause)
		defer cancel()
		f(ctx, 0)
	}
}
