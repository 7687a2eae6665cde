package semaphore

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var (
	//go:embed pool.lua
	poolLua string
	//go:embed acquire.lua
	acquireLua string
	//go:embed undo.lua
	undoLua string
	//go:embed release.lua
	releaseLua string
	//go:embed set.lua
	setLua string
	//go:embed add.lua
	addLua string
	//go:embed drain.lua
	drainLua string
	//go:embed leave.lua
	leaveLua string

	acquireScript = wire.NewScript(poolLua + acquireLua)
	undoScript    = wire.NewScript(poolLua + undoLua)
	releaseScript = wire.NewScript(poolLua + releaseLua)
	setScript     = wire.NewScript(poolLua + setLua)
	addScript     = wire.NewScript(poolLua + addLua)
	drainScript   = wire.NewScript(poolLua + drainLua)
	leaveScript   = wire.NewScript(poolLua + leaveLua)
)

// MaxPermits is the most permits a semaphore can have: what Java counts with.
const MaxPermits = math.MaxInt32

const (
	// ticketLife is for how long the server knows a request again, and settleTime for
	// how long it is sent again: the last try has to arrive well before.
	ticketLife = time.Minute
	settleTime = 45 * time.Second
	// undoTime is for how long it is tried to call a request off.
	undoTime = 5 * time.Minute
	// patience is for how long that is done while the caller waits.
	patience = 5 * time.Second
	minPause = 20 * time.Millisecond
	maxPause = time.Second

	// overtaking is for how long others may be served before a request that they
	// are younger than: for that long nobody has to wait for anybody's turn.
	overtaking = 100 * time.Millisecond
	// maxPlace bounds how long a client that has died keeps all others waiting.
	maxPlace = 3 * time.Second
)

// pool is what both semaphores are: a number of permits, and requests for some of
// them.
type pool struct {
	s       *session.Session
	numbers *numbers
	kind    string
	name    string
	key     string
	err     error // of the name
	scripts scripts

	channel string
	beside  []string // the keys beside that of the permits
}

// scripts are those that differ between the kinds.
type scripts struct{ acquire, undo, release *wire.Script }

func newPool(s *session.Session, kind, name string, scripts scripts) pool {
	p := pool{s: s, numbers: session.Of[numbers](s), kind: kind, name: name, scripts: scripts}
	p.key, p.err = s.Key(name, wire.CheckName)
	p.channel = wire.SemaphoreChannel(p.key)
	p.beside = []string{wire.SemaphoreWaiting(p.key), wire.SemaphoreAlive(p.key)}
	if p.expirable() {
		p.beside = append(p.beside, wire.PermitTimeouts(p.key))
	}
	return p
}

// expirable reports whether the permits have an identity and a lease.
func (p *pool) expirable() bool { return p.kind == kindExpirable }

// check returns why no operation can work, or nil.
func (p *pool) check(ctx context.Context) error {
	if p.err != nil {
		return p.err
	}
	return p.s.Check(ctx)
}

func checkPermits(n int) error {
	if n < 0 || n > MaxPermits {
		return fmt.Errorf("%w: %d permits: must be from 0 to %d", lock.ErrInvalid, n, MaxPermits)
	}
	return nil
}

func (p *pool) queueKey() queue.Key { return queue.Key{Kind: p.kind, Name: p.key} }

func (p *pool) described() telemetry.Lock { return telemetry.Lock{Kind: p.kind, Name: p.name} }

// place is for how long after its last sign of life a client keeps its place in the
// line of those who have waited for long.
func (p *pool) place() time.Duration { return min(maxPlace, p.s.WatchdogTimeout/3) }

// exec runs a script that begins with pool.lua.
func (p *pool) exec(ctx context.Context, script *wire.Script, n number, args []string) ([]int64, error) {
	keys := append(append(make([]string, 0, 2+len(p.beside)), p.key, n.ticket(p.key, p.s.ID)), p.beside...)
	args = append(append(make([]string, 0, 4+len(args)), n.String(), wire.Millis(ticketLife), p.s.Publish, p.channel), args...)
	reply, err := script.Exec(ctx, p.s.Client, keys, args).AsIntSlice()
	if err == nil && len(reply) == 0 {
		err = errors.New("redlatch: the server has an answer to a later request")
	}
	return reply, err
}

// call makes a request that takes effect once, and sends it again until there is an
// answer, ctx ends, or patience does. An error that matches lock.ErrIndeterminate
// says that it may have taken effect or may do so yet.
func (p *pool) call(ctx context.Context, script *wire.Script, args ...string) ([]int64, error) {
	reply, outcome, err := p.callAs(ctx, p.numbers.next(), patience, script, args)
	if outcome == wire.Unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return reply, err
}

// callAs makes the request of that number, as call does. With an error it returns what
// is known of all tries together.
func (p *pool) callAs(ctx context.Context, n number, patience time.Duration, script *wire.Script, args []string) ([]int64, wire.Outcome, error) {
	known := wire.Passing
	began := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		closed := p.s.Err() // then this try is the last
		tryCtx, cancel := p.s.Bounded(ctx)
		reply, err := p.exec(tryCtx, script, n, args)
		cancel()
		if err == nil {
			p.numbers.answered(n)
			return reply, wire.Refused, nil
		}
		outcome := wire.OutcomeOf(err)
		switch {
		case outcome == wire.Unknown:
			known = wire.Unknown
		case outcome == wire.Refused && known != wire.Unknown:
			p.numbers.answered(n)
			return nil, wire.Refused, err
		}
		switch {
		case closed != nil:
			return nil, known, errors.Join(closed, err)
		case outcome == wire.Refused || time.Since(began)+pause > patience, time.Now().After(n.until):
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

// settle sees to it in the background that f gets an answer of the server, for as
// long as that knows the request. When the client is being closed f has time for one
// more try.
func (p *pool) settle(f func(ctx context.Context, patience time.Duration)) {
	started := p.s.Go(func(ctx context.Context) {
		late, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(maxPause, cancel) })()
		f(late, settleTime)
	})
	if !started {
		ctx, cancel := context.WithTimeout(context.Background(), maxPause)
		defer cancel()
		f(ctx, 0)
	}
}

// set makes the semaphore if there is none.
func (p *pool) set(ctx context.Context, permits int, ttl time.Duration) (bool, error) {
	life := ""
	if ttl > 0 {
		life = wire.Millis(ttl)
	}
	reply, err := p.change(ctx, "set the permits of", permits, setScript, strconv.Itoa(permits), life)
	return reply == 1, err
}

// add changes how many permits there are.
func (p *pool) add(ctx context.Context, delta int, told string) error {
	permits := delta
	if delta < 0 && delta >= -MaxPermits {
		permits = -delta
	}
	if delta == 0 {
		return p.check(ctx)
	}
	reply, err := p.change(ctx, "add permits to", permits, addScript, strconv.Itoa(delta), told)
	if err == nil && reply < 0 {
		err = fmt.Errorf("%w: %+d permits for %q: there would be more than %d, or fewer than -%[4]d", lock.ErrInvalid, delta, p.name, MaxPermits)
	}
	return err
}

// change runs a script that changes the number of permits, and returns the first
// number of its reply.
func (p *pool) change(ctx context.Context, what string, permits int, script *wire.Script, args ...string) (int64, error) {
	if err := p.check(ctx); err != nil {
		return 0, err
	}
	if err := checkPermits(permits); err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("redlatch: %s %q: %w", what, p.name, context.Cause(ctx))
	}
	reply, err := p.call(ctx, script, args...)
	if err != nil {
		return 0, fmt.Errorf("redlatch: %s %q: %w", what, p.name, err)
	}
	return reply[0], nil
}
