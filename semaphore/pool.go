package semaphore

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// MaxPermits is the maximum number of permits of a semaphore, that of Java.
const MaxPermits = math.MaxInt32

// pool is the common part of both semaphores: a number of permits, and requests for them.
type pool struct {
	s       *session.Session
	slots   *slots
	kind    string
	name    string
	key     string
	err     error // invalid name
	scripts scripts

	channel   string
	otherKeys []string // the keys of a script after the first two
}

// scripts are the scripts that differ between the kinds.
type scripts struct{ acquire, undo, release *wire.Script }

func newPool(s *session.Session, kind, name string, scripts scripts) pool {
	p := pool{s: s, slots: session.Of[slots](s), kind: kind, name: name, scripts: scripts}
	p.key, p.err = s.Key(name, wire.CheckName)
	p.channel = wire.SemaphoreChannel(p.key)
	p.otherKeys = []string{wire.SemaphoreWaiting(p.key), wire.SemaphoreAlive(p.key)}
	if p.expirable() {
		p.otherKeys = append(p.otherKeys, wire.PermitTimeouts(p.key))
	}
	p.otherKeys = append(p.otherKeys, wire.SemaphoreRequest(p.key, "created", 0)) // no client has this id
	return p
}

// expirable reports whether the permits have an id and a lease.
func (p *pool) expirable() bool { return p.kind == kindExpirable }

// check returns an error if no operation can succeed.
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

func (p *pool) queues() *acquire.Queues[*request] { return acquire.Of[*request](p.s) }

func (p *pool) queueKey() acquire.Key { return acquire.Key{Kind: p.kind, Name: p.key} }

func (p *pool) telemetryLock() telemetry.Lock { return telemetry.Lock{Kind: p.kind, Name: p.name} }

// set creates the semaphore unless it exists.
func (p *pool) set(ctx context.Context, permits int, ttl time.Duration) (bool, error) {
	ttlArg := ""
	if ttl > 0 {
		ttlArg = wire.Millis(ttl)
	}
	reply, err := p.change(ctx, "set the permits of", permits, setScript, strconv.Itoa(permits), ttlArg)
	return reply == 1, err
}

// add changes the number of permits. payload selects the message: "total" or "delta".
func (p *pool) add(ctx context.Context, delta int, payload string) error {
	permits := delta
	if delta < 0 && delta >= -MaxPermits {
		permits = -delta
	}
	if delta == 0 {
		return p.check(ctx)
	}
	reply, err := p.change(ctx, "add permits to", permits, addScript, strconv.Itoa(delta), payload)
	if err == nil && reply < 0 {
		err = fmt.Errorf("%w: %+d permits for %q: the result must be from -%d to %[4]d", lock.ErrInvalid, delta, p.name, MaxPermits)
	}
	return err
}

// change runs a script that changes the number of permits, and returns the first number
// of its reply.
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
