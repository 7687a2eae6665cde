// Package countdown implements Redisson's count-down latch: a latch that releases all
// waiters when its count reaches zero. Java services on the same server count and wait
// on the same latches.
//
//	latch := client.CountDownLatch("import:42")
//	set, err := latch.TrySetCount(ctx, len(parts))
//	...
//	err = latch.Wait(ctx)
//
// and in each worker, when its part is done:
//
//	left, err := client.CountDownLatch("import:42").CountDown(ctx)
//
// # Rounds
//
// A latch without a count is open. A round begins when a count is set. It ends when the
// count reaches zero, is deleted, or its key expires; then the latch can be set again.
// Wait waits for the end of the round it finds, even if redlatch begins the next one at
// once. If Java does, Wait detects it only by a count that is higher than the last one
// it has seen. Otherwise it takes the next round for its own and waits for its end.
//
// A message on the latch's channel causes Wait to read the latch and nothing else.
//
// # Lost replies
//
// A request takes effect once. If its reply is lost, it is cancelled on the server and
// sent again, unless the server knows the reply. The error matches lock.ErrIndeterminate
// if the server stays away or ctx ends first: the request may have run, or may still.
// Counting down again could then end the round early; not doing so could leave it open
// forever. Therefore let the waiters use a deadline and check the results: they, not the
// count, say what is done. Results stored under one key per part (a row, an object, a
// member of a set) can safely be written twice. A server that loses its data loses the
// replies, too; a request that had no reply then takes effect on what is left.
//
// A process that dies before it counts down leaves the count unchanged: a latch has no
// lease. Use Wait with a deadline, or set the count with TrySetCountFor, so that the server
// deletes it after a time.
package countdown

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// MaxCount is the highest count that TrySetCount accepts. Java accepts higher ones.
const MaxCount = math.MaxInt32

// Latch is a count-down latch. It is created by Client.CountDownLatch and is safe for
// concurrent use. It is immutable: the count is on the server.
type Latch struct {
	all  *Shared
	s    *session.Session
	name string
	key  string
	err  error // the name is invalid
}

// New returns the latch of that name. Client.CountDownLatch calls it.
func New(all *Shared, name string) *Latch {
	l := &Latch{all: all, s: all.s, name: name}
	l.key, l.err = l.s.Key(name, l.s.CheckLatchName)
	return l
}

// Name returns the name that was passed to Client.CountDownLatch.
func (l *Latch) Name() string { return l.name }

// TrySetCount begins a round with a count of n unless one is in progress, and reports
// whether it did. It blocks for one round trip, and up to 5 s longer if the server is
// temporarily unavailable. If n is negative or above MaxCount, the error matches
// lock.ErrInvalid. If no reply arrives, it matches lock.ErrIndeterminate: the count may or
// may not have been set. A key of another type is an error and remains unchanged.
//
// A count of 0 needs no round, because a latch without a count is open. TrySetCount with
// n = 0 writes nothing. It returns true if the latch is open, so that Wait returns at once,
// and false if a round is in progress.
func (l *Latch) TrySetCount(ctx context.Context, n int) (bool, error) {
	return l.trySetCount(ctx, n, "")
}

// TrySetCountFor is TrySetCount for a count that the server deletes after ttl, whatever is
// left of it. That ends the round as Delete does: Wait returns nil, and Redisson waiters
// stay blocked. Counting down does not change the time. The time counts from when the server
// sets the count. If ttl is less than a millisecond or above lock.MaxLease, the error matches
// lock.ErrInvalid.
func (l *Latch) TrySetCountFor(ctx context.Context, n int, ttl time.Duration) (bool, error) {
	if err := session.CheckLease(ttl); err != nil {
		return false, l.object().Refused("set count", err)
	}
	return l.trySetCount(ctx, n, wire.Millis(ttl))
}

// trySetCount sets a count with a time to live in ms, "" for none.
func (l *Latch) trySetCount(ctx context.Context, n int, ttl string) (bool, error) {
	if n < 0 || n > MaxCount {
		return false, l.object().Refused("set count", fmt.Errorf("%w: %d is not from 0 to %d", lock.ErrInvalid, n, MaxCount))
	}
	if n == 0 {
		count, err := l.Count(ctx)
		return err == nil && count == 0, err
	}

	set, err := l.exec(ctx, trySetCountScript, "set count", "have been set",
		wire.PayloadLatchShut, strconv.Itoa(n), wire.NewRequestID(), wire.Millis(roundTTL), ttl)
	return set == 1, err
}

// CountDown decrements the count and returns what is left. At zero the round ends: the
// key is deleted and all waiters are notified. Without a count it does nothing and
// returns 0. It blocks for one round trip, and up to 5 s longer if the server is
// temporarily unavailable.
//
// It counts once, even if replies are lost. If no reply arrives within these 5 s or
// before ctx ends, the error matches lock.ErrIndeterminate: the count may or may not have
// been decremented; see the package documentation. After any other error the count is
// unchanged. A key of another type is an error and remains unchanged.
func (l *Latch) CountDown(ctx context.Context) (left int, err error) {
	return l.CountDownN(ctx, 1)
}

// CountDownN is CountDown by n, or by the remaining count if that is less. If n is less
// than 1, the error matches lock.ErrInvalid.
func (l *Latch) CountDownN(ctx context.Context, n int) (left int, err error) {
	if n < 1 {
		return 0, l.object().Refused("count down", fmt.Errorf("%w: %d is less than 1", lock.ErrInvalid, n))
	}
	return l.exec(ctx, countDownScript, "count down", "have come down", wire.PayloadLatchOpen, strconv.Itoa(n))
}

// Count returns the remaining count, 0 if there is none. It blocks for one round trip.
// A key of another type is an error.
func (l *Latch) Count(ctx context.Context) (int, error) {
	if err := l.check(ctx); err != nil {
		return 0, l.object().Refused("read", err)
	}

	began := time.Now()
	text, err := wire.Read(ctx, l.s.Client, "GET", l.key).ToString()
	if rueidis.IsRedisNil(err) {
		return 0, nil
	}

	var count int64
	if err == nil {
		count, err = parseCount(text)
	}
	if err != nil {
		return 0, l.object().ReadFailed(ctx, "read", began, errors.Join(l.s.Err(), err))
	}

	return int(min(count, math.MaxInt)), nil
}

// Delete ends the round, whatever its count, and reports whether there was one. It
// releases redlatch waiters. Redisson waiters stay blocked: Redisson notifies them only
// at the end of a later round. Delete blocks like CountDown. If no reply arrives, the
// error matches lock.ErrIndeterminate: the count may or may not have been deleted. A
// key of another type is an error and remains unchanged.
func (l *Latch) Delete(ctx context.Context) (bool, error) {
	deleted, err := l.exec(ctx, deleteScript, "delete", "have been deleted", wire.PayloadLatchShut)
	return deleted == 1, err
}

// Wait blocks until the round it finds has ended, and returns nil; at once if the latch
// is open. If ctx ends first it returns the cause of ctx, wrapped, which also matches
// lock.ErrUnavailable if the server did not answer last. If the client is closed, the error
// matches lock.ErrClosed. Wait also waits for a server that cannot be reached. It returns an error at
// once if the server denies the request or the key has another type.
//
// All waiters of a latch in one process share a subscription and their reads. A lost
// message delays them by at most 5 s. A count that expires sends no message; the waiters read
// the latch when its time is over.
func (l *Latch) Wait(ctx context.Context) error { return <-l.WaitChan(ctx) }

// WaitChan begins a Wait and returns a channel for its result, for use in a select
// statement. It does not block. The channel is closed when the round has ended, so that
// every receive yields nil. If the wait fails, the channel delivers the error of Wait
// instead, once, and is never closed. The end of ctx is such an error.
//
// Each call begins a wait of its own: call WaitChan before a loop, not in its select
// statement. A wait lasts until the round ends, ctx ends or the client is closed, even if
// nobody receives from the channel. It needs no goroutine.
func (l *Latch) WaitChan(ctx context.Context) <-chan error {
	result := make(chan error, 1)
	if err := l.startWait(ctx, result); err != nil {
		result <- err
	}
	return result
}

// startWait begins a wait that ends with a result, unless it returns an error.
func (l *Latch) startWait(ctx context.Context, result chan<- error) error {
	if err := l.check(ctx); err != nil {
		return l.object().Refused("wait", err)
	}

	began := time.Now()
	if ctx.Err() != nil {
		return l.notOpen(ctx, began, nil)
	}

	end := l.s.Telemetry.StartWait(ctx, telemetry.Lock(l.object()))
	w := &waiter{name: l.name, since: began, site: callsite.Here()}
	w.end = func() {
		var err error
		if !w.opened {
			err = l.notOpen(ctx, began, w.lastErr)
		}
		end(w.reads, err)
		if err != nil {
			result <- err
			return
		}
		close(result)
	}
	if !l.all.join(ctx, l.key, w) {
		w.end() // the client is closed
	}
	return nil
}

// notOpen returns the error of a wait that began then: the client is closed, the last read has
// failed with err, or ctx has ended. While the latch is only closed, its error has no kind.
func (l *Latch) notOpen(ctx context.Context, began time.Time, err error) error {
	closed := l.s.Stopped()
	if err == nil && closed == nil {
		return l.object().Ended(ctx, "wait", began)
	}
	return l.object().ReadFailed(ctx, "wait", began, errors.Join(closed, err))
}

// object returns what errors name.
func (l *Latch) object() wire.Object { return wire.Object{Kind: "latch", Name: l.name} }

// check returns an error if no operation on the latch can succeed.
func (l *Latch) check(ctx context.Context) error {
	return cmp.Or(l.err, l.s.Check(ctx))
}

// retryTimeout bounds the retries of a request.
const retryTimeout = 5 * time.Second

// exec runs a script that must not run twice. Each request has an id, under which the
// server caches its reply. A request whose reply was lost is cancelled, and sent under a
// new id if it has not run. op is the Op of its error, which names the possible effect.
func (l *Latch) exec(ctx context.Context, script *wire.Script, op, effect string, args ...string) (int, error) {
	if err := l.check(ctx); err != nil {
		return 0, l.object().Refused(op, err)
	}

	start := time.Now()
	if ctx.Err() != nil { // before sending
		return 0, l.object().Failed(ctx, op, start, lock.ErrUnavailable)
	}

	args = append([]string{wire.Millis(replyTTL), l.s.Publish, wire.LatchChannel(l.key)}, args...)
	id := wire.NewRequestID()
	next := script
	var n int64
	var err error
	err = l.s.Retry(ctx, start.Add(retryTimeout), func(ctx context.Context) error {
		for next != cancelScript || l.s.Err() == nil { // a closing client leaves the outcome unknown
			keys := []string{l.key, wire.LatchRound(l.key), cachedReply(l.key, id)}
			n, err = wire.Number(next.Exec(ctx, l.s.Client, keys, args), wire.Range{Least: -1, Most: math.MaxInt64})
			if err == nil && n < 0 && time.Since(start) >= replyTTL {
				err = errTooLate
			}
			if err == nil && n < 0 { // cancelled
				id = wire.NewRequestID()
				next = script
				continue
			}
			if wire.IsUnknown(err) {
				next = cancelScript
			}
			break
		}
		return err
	}, wire.IsRefused)
	if err == nil {
		return int(min(n, math.MaxInt)), nil
	}
	if next == cancelScript {
		err = errors.Join(fmt.Errorf("%w: the count may or may not %s", lock.ErrIndeterminate, effect), err)
	}
	return 0, l.object().Failed(ctx, op, start, err)
}
