package semaphore

import (
	"context"
	"embed"
	"errors"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript = wire.LoadScript(luaFiles, "pool", "acquire")
	undoScript    = wire.LoadScript(luaFiles, "pool", "undo")
	releaseScript = wire.LoadScript(luaFiles, "pool", "release")
	setScript     = wire.LoadScript(luaFiles, "pool", "set")
	addScript     = wire.LoadScript(luaFiles, "pool", "add")
	drainScript   = wire.LoadScript(luaFiles, "pool", "drain")
	leaveScript   = wire.LoadScript(luaFiles, "pool", "leave")

	permitAcquireScript = wire.LoadScript(luaFiles, "pool", "permits", "permit_acquire")
	permitUndoScript    = wire.LoadScript(luaFiles, "pool", "permits", "permit_undo")
	permitReleaseScript = wire.LoadScript(luaFiles, "pool", "permits", "permit_release")
	permitSetScript     = wire.LoadScript(luaFiles, "pool", "permits", "permit_set")
	permitCountsScript  = wire.LoadScript(luaFiles, "permit_counts")
	permitLeftScript    = wire.LoadScript(luaFiles, "permits", "permit_left")
	permitExtendScript  = wire.LoadScript(luaFiles, "permits", "permit_extend")
	permitRenewScript   = wire.LoadScript(luaFiles, "permit_renew")
)

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
