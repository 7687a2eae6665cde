package semaphore

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// MaxPermits is the maximum number of permits of a semaphore, the same as in Java.
const MaxPermits = math.MaxInt32

// pool is the common part of both semaphores: a number of permits, and requests for them.
type pool struct {
	s       *session.Session
	slots   *slots
	id      telemetry.Lock
	key     string
	err     error // invalid name or option
	scripts scripts
	size    int    // with which a missing semaphore is created, 0 if it is not
	idle    string // ms after its last use at which it expires, "" if it does not

	queues    *engine.Queues
	queueKey  engine.Key
	channel   string
	keys      []string // of the scripts that have pool.lua
	heartbeat string   // heartbeatTimeout in ms
}

// scripts are the scripts that differ between the kinds.
type scripts struct{ acquire, undo, release *wire.Script }

// Shared is what the semaphores of one client share.
type Shared struct {
	e       *engine.Engine
	slots   slots
	permits registry
}

// NewShared returns what the semaphores of a client share. There is one for each engine.
func NewShared(e *engine.Engine) *Shared {
	all := &Shared{e: e}
	e.Session.List(all.permits.Holds)
	return all
}

func newPool(all *Shared, kind, name string, scripts scripts, opts []Option) pool {
	s := all.e.Session
	p := pool{s: s, slots: &all.slots, id: telemetry.Lock{Kind: kind, Name: name}, scripts: scripts}
	p.key, p.err = s.Key(name, s.CheckName)
	p.err = cmp.Or(p.err, session.Configure(&p, opts))
	p.queues = &all.e.Queues
	p.queueKey = engine.Key{Kind: kind, Name: p.key}
	p.channel = wire.SemaphoreChannel(p.key)
	p.heartbeat = wire.Millis(p.heartbeatTimeout())
	p.keys = []string{
		p.key, wire.SemaphoreRequests(p.key, s.ID), wire.SemaphoreWaiting(p.key), wire.SemaphoreAlive(p.key), wire.SemaphoreCreated(p.key),
	}
	if p.leased() {
		p.keys = append(p.keys, wire.PermitTimeouts(p.key))
	}
	return p
}

// leased reports whether the permits have an id and a lease.
func (s *pool) leased() bool { return s.id.Kind == kindPermitSemaphore }

// check returns an error if no operation can succeed.
func (s *pool) check(ctx context.Context) error {
	return cmp.Or(s.err, s.s.Check(ctx))
}

// enter precedes a request for op of a number of permits with Enter of the session, or their release with
// Stay. Unless it reports true the request must not be sent; if it does, Leave of the session follows.
func (s *pool) enter(ctx context.Context, op string, permits, most int, open func() bool) (ok bool, err error) {
	if err := cmp.Or(s.check(ctx), checkCount(permits, 0, most)); err != nil || permits == 0 {
		return false, s.object().Refused(op, err)
	}
	if !open() {
		return false, s.object().Refused(op, lock.ErrClosed)
	}

	return true, nil
}

func checkCount(n, least, most int) error {
	if n < least || n > most {
		return fmt.Errorf("%w: %d permits: must be from %d to %d", lock.ErrInvalid, n, least, most)
	}
	return nil
}

// Name returns the name that the client was given.
func (s *pool) Name() string { return s.id.Name }

// change runs a script that changes the number of permits, and takes effect at most once. It
// returns the first number of the reply. An error that matches lock.ErrIndeterminate means
// that the script may have taken effect, or may still do so.
func (s *pool) change(ctx context.Context, op string, permits int, script *wire.Script, args ...string) (int64, error) {
	if err := cmp.Or(s.check(ctx), checkCount(permits, 0, MaxPermits)); err != nil {
		return 0, s.object().Refused(op, err)
	}

	began := time.Now()
	if ctx.Err() != nil {
		return 0, s.failed(ctx, op, began, lock.ErrUnavailable)
	}

	seq := s.slots.next()
	defer s.slots.done(seq)

	reply, outcome, err := s.retry(ctx, patience, seq, script, args)
	if err == nil {
		return reply[0], nil
	}
	if outcome == wire.Unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return 0, s.failed(ctx, op, began, err)
}

// object returns what errors name.
func (s *pool) object() wire.Object { return wire.Object(s.id) }

// failed returns the error of a call for op that began then.
func (s *pool) failed(ctx context.Context, op string, began time.Time, err error) error {
	return s.object().Failed(ctx, op, began, err)
}

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript = loadUse("usual", "acquire_usual", "pool", "acquire")
	undoScript    = wire.LoadScript(luaFiles, "pool", "undo").AtRest()
	releaseScript = loadUse("usual", "release_usual", "pool", "release")
	setScript     = loadUse("pool", "set")
	addScript     = loadUse("pool", "add")
	drainScript   = loadUse("pool", "drain")
	resizeScript  = loadUse("pool", "resize")
	deleteScript  = wire.LoadScript(luaFiles, "pool", "delete").AtRest()
	statsScript   = wire.LoadScript(luaFiles, "stats")
	leaveScript   = wire.LoadScript(luaFiles, "pool", "leave").AtRest()

	permitAcquireScript = loadUse("usual", "permit_acquire_usual", "pool", "permits", "permit_acquire")
	permitUndoScript    = loadUse("pool", "permits", "permit_undo")
	permitReleaseScript = loadUse("usual", "permit_release_usual", "pool", "permits", "permit_release")
	permitLeftScript    = wire.LoadScript(luaFiles, "permits", "permit_left")
	permitExtendScript  = use(wire.LoadScript(luaFiles, "permits", "permit_extend"),
		loadKeeping("idle_use", "permits", "permit_extend"))
	permitRenewScript    = wire.LoadScript(luaFiles, "permit_renew")
	permitTransferScript = loadUse("pool", "permits", "permit_transfer")

	keepingRenewScript = loadKeeping("idle_renew", "permit_renew")
)

// keeping has, for each script that uses a semaphore, the one that also sets its lifetime: see IdleTTL.
var keeping = map[*wire.Script]*wire.Script{}

// use notes the script that also sets the lifetime of a semaphore, and returns the one that does not.
func use(s, with *wire.Script) *wire.Script {
	keeping[s] = with
	return s
}

// loadUse prepares both of them, for a semaphore whose slot does not move.
func loadUse(names ...string) *wire.Script {
	return use(wire.LoadScript(luaFiles, names...).AtRest(), loadKeeping("idle_use", names...).AtRest())
}

// loadKeeping prepares a script for IdleTTL, which ends with the file last: see idle.lua.
func loadKeeping(last string, names ...string) *wire.Script {
	operation := "local function operation()\n" + wire.Source(luaFiles, names...) + "end\n"
	return wire.NewScript(operation + wire.Source(luaFiles, "idle", last))
}

// scriptFor returns the script to send in place of s, with its arguments, to use a semaphore that expires when
// it has not been used for so many ms, "" if it does not.
func scriptFor(s *wire.Script, args []string, idle string) (*wire.Script, []string) {
	if idle == "" {
		return s, args
	}
	with, uses := keeping[s]
	if !uses {
		return s, args
	}
	return with, append(args, idle)
}

const (
	// retryTime is how long a request is accepted, retried or undone, and cacheTTL how long
	// the server keeps its reply at least. The local clock may differ by clockError from the known
	// time of the server before a request takes more round trips. The scripts know the last two.
	retryTime  = 5 * time.Minute
	clockError = time.Minute
	cacheTTL   = retryTime + clockError
	// patience is how long a request is retried while the caller waits.
	patience = 5 * time.Second

	// bargingTime is how long a request waits before it joins the wait queue. Until then
	// younger requests may overtake it, and no request waits for another process.
	bargingTime = 100 * time.Millisecond
	// maxHeartbeatTimeout bounds how long a dead client delays all others.
	maxHeartbeatTimeout = 3 * time.Second
)

// Arguments of the scripts, in ms.
var (
	bargingMillis  = wire.Millis(bargingTime)
	firstTryMillis = wire.Millis(retryTime - clockError)
	anyTimeLeft    = wire.Millis(0)
)

// heartbeatTimeout returns how long after its last heartbeat a client keeps its position
// in the wait queue.
func (s *pool) heartbeatTimeout() time.Duration {
	return min(maxHeartbeatTimeout, s.s.WatchdogTimeout/3)
}

// sequence identifies a request, so that it takes effect once however often it is
// delivered, and can be undone. It is the state of a slot. See Retries in the package
// documentation.
type sequence struct {
	slot       string
	n          uint64
	notAfter   int64  // ms, by the server's clock
	batch      int    // how many requests for permits it has
	idle       string // as of the pool, for one of these requests
	mayHaveRun bool
	sent       time.Time // the first attempt that may have run, or the last one
	args       []string  // reused
}

// slots assigns sequence numbers. A slot has one request in progress at a time, so there
// are as many slots as concurrent requests. The zero slots is ready for use.
type slots struct {
	mu    sync.Mutex
	idle  []*sequence
	count int
	ahead atomic.Int64 // by how many ms the server's clock is ahead of the local one
}

// next returns the sequence number of a new request.
func (s *slots) next() *sequence {
	s.mu.Lock()
	defer s.mu.Unlock()

	if len(s.idle) == 0 {
		s.count++
		s.idle = append(s.idle, &sequence{slot: strconv.Itoa(s.count)})
	}
	last := len(s.idle) - 1
	seq := s.idle[last] // the slot used last: few slots need little memory
	s.idle = s.idle[:last]
	seq.n++
	seq.batch = 0
	seq.idle = ""
	seq.mayHaveRun = false
	seq.notAfter = time.Now().UnixMilli() + s.ahead.Load() + retryTime.Milliseconds()
	return seq
}

// done returns the slot of a request that is not sent again. If it has no answer, the next
// request of the slot prevents it from running later.
func (s *slots) done(seq *sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, seq)
}

// errTooLate is the error of a request that the server no longer runs.
var errTooLate = errors.New("redlatch: the request came too late for the server")

// exec runs a script that has pool.lua. It sends a request once more if the server's
// time was unknown: if this is the first attempt or, because the local clock is ahead, no
// attempt can have run yet.
func (s *pool) exec(ctx context.Context, script *wire.Script, seq *sequence, args []string) ([]int64, error) {
	least := firstTryMillis // must be left: a first attempt needs time for retries
	if seq.mayHaveRun {
		least = anyTimeLeft
	}
	send := func() ([]int64, error) {
		if !seq.mayHaveRun {
			seq.sent = time.Now()
		}
		seq.args = append(seq.args[:0], strconv.FormatUint(seq.n, 10), seq.slot, strconv.FormatInt(seq.notAfter, 10),
			least, s.s.Publish, s.channel)
		seq.args = append(seq.args, args...)
		var sent *wire.Script
		sent, seq.args = scriptFor(script, seq.args, cmp.Or(s.idle, seq.idle))
		return s.decode(sent.Exec(ctx, s.s.Client, s.keys, seq.args), script, seq.batch)
	}
	reply, err := send()
	if len(reply) == 2 && (!seq.mayHaveRun || seq.notAfter-reply[1] >= cacheTTL.Milliseconds()) {
		s.slots.ahead.Store(reply[1] - time.Now().UnixMilli())
		seq.notAfter = reply[1] + retryTime.Milliseconds()
		reply, err = send()
	}
	if err == nil && (len(reply) == 0 || len(reply) == 2) { // a later request of the slot has run, or it is late
		err = errTooLate
	}

	seq.mayHaveRun = seq.mayHaveRun || wire.IsUnknown(err)
	return reply, err
}

// longestReply is the longest reply of a script that has pool.lua.
const longestReply = 6

// decode decodes the reply of a script that has pool.lua to a request with a batch of that
// many. It has no number or two if the script has not run, and otherwise as many as the script says.
func (s *pool) decode(reply rueidis.RedisResult, script *wire.Script, batch int) ([]int64, error) {
	parts, err := wire.List(reply, 0, longestReply)
	if err != nil {
		return nil, err
	}

	numbers, err := wire.NumbersIn(parts, wire.Any)
	if err != nil {
		return nil, err
	}

	valid := len(numbers) == 1
	if len(numbers) == 0 || len(numbers) == 2 {
		valid = true
	} else if script == s.scripts.acquire {
		valid = s.serves(numbers, batch)
	} else if script == s.scripts.release && len(numbers) > 2 {
		valid = releaseDone <= numbers[0] && numbers[0] <= releasePartly && s.serves(numbers[2:], batch)
	} else if script == s.scripts.release {
		valid = releaseTooMany <= numbers[0] && numbers[0] < releaseDone
	}

	if !valid {
		return nil, wire.ErrReply
	}

	return numbers, nil
}

// serves reports whether acquire.lua can have replied that to a batch of that many requests.
func (s *pool) serves(reply []int64, batch int) bool {
	width := 3
	if s.leased() {
		width = 4
	}
	return len(reply) == width && 0 <= reply[0] && reply[0] <= int64(batch) && -1 <= reply[2] && reply[2] <= 1
}

// final reports whether a request that failed with err would fail again.
func final(err error) bool { return wire.IsRefused(err) || errors.Is(err, errTooLate) }

// retry repeats a request until the server answers, ctx is done, or patience runs out, sooner if the
// server rejects all writes. Along with an error it returns the outcome of all attempts together.
func (s *pool) retry(ctx context.Context, patience time.Duration, seq *sequence, script *wire.Script, args []string) (
	reply []int64, outcome wire.Outcome, err error) {
	var by time.Time // or one attempt
	if patience > 0 {
		by = time.Now().Add(patience)
	}
	_, err = s.s.RetryWrite(ctx, by, func(ctx context.Context) (err error) {
		reply, err = s.exec(ctx, script, seq, args)
		outcome = wire.Unknown
		if err != nil && !seq.mayHaveRun {
			outcome = wire.OutcomeOf(err)
		}
		return err
	}, final)
	return reply, outcome, err
}

// ended returns the error of a release that has failed with err, and that the background repeats: its
// outcome is unknown, unless the server has rejected every attempt because it rejects all writes.
func ended(err error, outcome wire.Outcome) error {
	if outcome == wire.Passing && wire.IsTurnedAway(err) {
		return wire.Classify(err)
	}
	return errors.Join(lock.ErrIndeterminate, err)
}

// always returns a function for repeat.
func always(args []string) func() []string { return func() []string { return args } }

// repeat repeats a request in the background, for as long as the server accepts it, and then
// calls done with the reply, nil if there is none. It closes answered after that.
func (s *pool) repeat(seq *sequence, script *wire.Script, args func() []string, done func(reply []int64)) (answered <-chan struct{}) {
	return s.s.CleanUp(retryTime, func(ctx context.Context) (time.Duration, error) {
		for {
			reply, err := s.exec(ctx, script, seq, args())
			if err == nil || final(err) {
				s.slots.done(seq)
				if err != nil {
					done(nil)
					return -1, nil //nolint:nilerr // it is final, so there is nothing to repeat
				}
				done(reply)
				return -1, nil
			}
			if s.s.Err() == nil || ctx.Err() != nil {
				return -1, err
			}
			time.Sleep(session.MinPause) // while the client is closing, this is the last call
		}
	})
}
