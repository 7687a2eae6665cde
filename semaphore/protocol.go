package semaphore

import (
	"context"
	"embed"
	"errors"
	"strconv"
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
	// retryTime is how long a request is accepted, retried or undone, and cacheTTL how long
	// the server keeps its reply. The local clock may differ by clockError from the known
	// time of the server before a request takes a second round trip.
	retryTime  = 5 * time.Minute
	clockError = time.Minute
	cacheTTL   = retryTime + clockError
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

// errTooLate is the error of a request that the server no longer runs.
var errTooLate = errors.New("redlatch: the request came too late for the server")

// exec runs a script that begins with pool.lua. It sends the first attempt of a request once
// more if the server's time was unknown.
func (p *pool) exec(ctx context.Context, script *wire.Script, seq *sequence, args []string) ([]int64, error) {
	keys := append(append(make([]string, 0, 2+len(p.otherKeys)), p.key, wire.SemaphoreRequest(p.key, p.s.ID, seq.slot)), p.otherKeys...)
	for again := false; ; again = true {
		all := append(append(make([]string, 0, 6+len(args)), strconv.FormatUint(seq.n, 10), wire.Millis(cacheTTL),
			strconv.FormatInt(seq.notAfter, 10), seq.least(), p.s.Publish, p.channel), args...)
		reply, err := script.Exec(ctx, p.s.Client, keys, all).AsIntSlice()
		late := err == nil && len(reply) == 2
		switch {
		case late && !again && !seq.mayHaveRun:
			p.slots.renew(seq, reply[1])
			continue
		case late || err == nil && len(reply) == 0: // or a later request of the slot has run
			err = errTooLate
		}
		seq.mayHaveRun = seq.mayHaveRun || err != nil && wire.OutcomeOf(err) == wire.Unknown
		return reply, err
	}
}

// call sends a request that takes effect at most once, and retries it until the server
// answers, ctx is done, or patience runs out. An error that matches lock.ErrIndeterminate
// means that the request may have taken effect, or may still do so.
func (p *pool) call(ctx context.Context, script *wire.Script, args ...string) ([]int64, error) {
	seq := p.slots.next()
	defer p.slots.done(seq)
	reply, outcome, err := p.retry(ctx, seq, patience, script, args)
	if outcome == wire.Unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return reply, err
}

// retry is call for a given sequence number and patience. Along with an error it returns
// the outcome of all attempts together.
func (p *pool) retry(ctx context.Context, seq *sequence, patience time.Duration, script *wire.Script, args []string) ([]int64, wire.Outcome, error) {
	began := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		closed := p.s.Err() // makes this attempt the last
		attemptCtx, cancel := p.s.Bounded(ctx)
		reply, err := p.exec(attemptCtx, script, seq, args)
		cancel()
		if err == nil {
			return reply, wire.Refused, nil
		}
		outcome := wire.OutcomeOf(err)
		final := outcome == wire.Refused || errors.Is(err, errTooLate)
		if seq.mayHaveRun {
			outcome = wire.Unknown
		}
		switch {
		case closed != nil && outcome != wire.Refused:
			return nil, outcome, errors.Join(closed, err)
		case final || time.Since(began)+pause > patience:
			return nil, outcome, err
		}
		select {
		case <-time.After(pause):
		case <-p.s.Done():
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return nil, outcome, errors.Join(context.Cause(ctx), err)
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
