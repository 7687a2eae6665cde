// Package countdown is the count-down latch of Redisson: a count that somebody sets,
// that others bring down, and at whose end everybody goes on who waits for it. Java
// services on the same server count and wait at the same latches.
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
// A latch without a count is open. A round begins when a count is set and is over when
// nothing is left of it, when it is deleted or when its key expires; then the latch can
// be set again. Wait waits for the end of the round that it finds, also if the next one
// has begun by then. Messages that were lost make no difference where redlatch set the
// next count, or where that is higher than what was left. Otherwise, where Java did so at
// once, Wait may take the next round for its own: also without any loss, if all that falls
// into the moment in which it begins to wait, or if a cluster uses plain pub/sub.
//
// Whoever waits takes a message on the latch's channel for the end of the round. Channels
// know no databases: give latches in different databases of one server different names,
// and publish nothing there by hand.
//
// # When a count may have come down
//
// A count is all that the server keeps: it does not know who has counted. CountDown is
// therefore never sent twice. If the answer does not come, the error matches
// lock.ErrIndeterminate and says that the count may or may not have come down, or may
// still. Counting down again could end the round too early, and not doing so could leave
// it open for ever. Which of the two does less harm only the program knows:
//
//   - Where an early end does no harm, because whoever waits looks at the results and
//     at what is missing: count down again.
//   - Where it would: do not, and let whoever waits do so with a deadline, look at the
//     results when that has passed, and Delete the latch.
//
// Either way the results, and not the count, say what is done. Results under a key for
// each part (a row, an object, a member of a set) can be written twice without harm.
//
// A process that dies before it counts down leaves the count as it is, too: a latch has
// no lease, and its key no expiry. Wait with a deadline.
package countdown

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// MaxCount is the highest count that TrySetCount takes. Java's can be higher.
const MaxCount = math.MaxInt32

// kind is what a latch is called in traces.
const kind = "latch"

// Latch is a count-down latch. It is made by Client.CountDownLatch and can be used by
// any number of goroutines. It is immutable: the count is on the server.
type Latch struct {
	s    *session.Session
	name string
	key  string
	err  error // of the name
}

// New returns the latch of that name. It is called by the client.
func New(s *session.Session, name string) *Latch {
	l := &Latch{s: s, name: name}
	l.key, l.err = s.Key(name, wire.CheckLatchName)
	return l
}

// Name returns the name the latch was asked for with.
func (l *Latch) Name() string { return l.name }

// TrySetCount begins a round with a count of n, unless one goes on, and reports whether
// it did. A count of 0 begins none, since that is over: nothing is written, and it
// reports whether the latch is open. It blocks for one round trip, and for up to 5 s
// more if the server cannot serve it at the moment. If n is less than 0 or more than
// MaxCount, the error matches lock.ErrInvalid; if the answer does not come,
// lock.ErrIndeterminate, and the count may or may not have been set. A key that holds
// something else is an error, and left alone.
func (l *Latch) TrySetCount(ctx context.Context, n int) (bool, error) {
	if n < 0 || n > MaxCount {
		return false, fmt.Errorf("%w: TrySetCount %q: %d is not from 0 to %d", lock.ErrInvalid, l.name, n, MaxCount)
	}
	if n == 0 {
		count, err := l.Count(ctx)
		return err == nil && count == 0, err
	}
	set, err := l.exec(ctx, trySetCountScript, "set the count of", "have been set",
		strconv.Itoa(n), wire.NewRequestID(), wire.Millis(roundLife),
		l.s.Publish, l.channel(), payloadSet)
	return set == 1, err
}

// CountDown takes one off the count and returns what is left. When nothing is, the
// round is over: the key goes, and everybody is told. Without a count it does nothing
// and returns 0. It blocks for one round trip, and for up to 5 s more if the server
// cannot serve it at the moment.
//
// It counts once or not at all, and is never sent twice: if the answer does not come,
// because the connection is lost or ctx ends, the error matches lock.ErrIndeterminate.
// The count then may or may not have come down; see the package's documentation for what
// to do. After any other error it has not. A key that holds something else is an error,
// and left alone.
func (l *Latch) CountDown(ctx context.Context) (left int, err error) {
	return l.CountDownN(ctx, 1)
}

// CountDownN is CountDown by n at once, or by what is left if that is less. If n is
// less than 1 the error matches lock.ErrInvalid.
func (l *Latch) CountDownN(ctx context.Context, n int) (left int, err error) {
	if n < 1 {
		return 0, fmt.Errorf("%w: CountDownN %q: %d is less than 1", lock.ErrInvalid, l.name, n)
	}
	return l.exec(ctx, countDownScript, "count down", "have come down",
		strconv.Itoa(n), l.s.Publish, l.channel(), payloadOpen)
}

// Count returns what is left of the count, 0 if there is none. It blocks for one round
// trip. A key that holds something else is an error.
func (l *Latch) Count(ctx context.Context) (int, error) {
	if err := l.check(ctx); err != nil {
		return 0, err
	}
	text, err := wire.Read(ctx, l.s.Client, "GET", l.key).ToString()
	if rueidis.IsRedisNil(err) {
		return 0, nil
	}
	var count int64
	if err == nil {
		count, err = parseCount(text)
	}
	if err != nil {
		return 0, fmt.Errorf("redlatch: look at %q: %w", l.name, l.with(ctx, err))
	}
	return int(min(count, math.MaxInt)), nil
}

// Delete ends the round, whatever is left of the count, and reports whether there was
// one. Those who wait with redlatch go on. Those who wait with Redisson do not: it tells
// them nothing until another round has come to its end. It blocks like CountDown; if the
// answer does not come, the error matches lock.ErrIndeterminate, and the count may or
// may not have been deleted. A key that holds something else is an error, and left alone.
func (l *Latch) Delete(ctx context.Context) (bool, error) {
	deleted, err := l.exec(ctx, deleteScript, "delete", "have been deleted",
		l.s.Publish, l.channel(), payloadSet)
	return deleted == 1, err
}

// Wait blocks until the round that it finds is over, and returns nil; at once if the
// latch is open. It returns the cause of ctx, wrapped, if that ends before, and an error
// that matches lock.ErrClosed if the client is closed. A server that is not available is
// waited for as well, for as long as the watchdog timeout; after that, or if the server
// refuses to be asked or the key holds something else, it returns that error.
//
// All who wait for a latch in one process share a subscription and the looks at the
// server. A message that is lost is made up for within 5 s.
func (l *Latch) Wait(ctx context.Context) error {
	if err := l.check(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return l.waiting(context.Cause(ctx))
	}
	if !l.s.Enter() {
		return lock.ErrClosed
	}
	defer l.s.Leave()
	span := l.s.Telemetry.StartWait(ctx, telemetry.Lock{Kind: kind, Name: l.name})
	looks, err := l.wait(ctx)
	span.End(ctx, looks, err)
	return err
}

func (l *Latch) wait(ctx context.Context) (looks int, err error) {
	w := &waiter{released: make(chan struct{})}
	d := session.Of[gates](l.s).join(l.s, l.key, w)
	select {
	case <-w.released:
	case <-ctx.Done():
		err = l.waiting(context.Cause(ctx))
	case <-l.s.Done():
		err = lock.ErrClosed
	}
	if d.leave(w) {
		if w.err != nil {
			return w.looks, errors.Join(l.s.Err(), l.waiting(w.err))
		}
		return w.looks, nil
	}
	return w.looks, errors.Join(err, w.trouble)
}

func (l *Latch) waiting(err error) error {
	return fmt.Errorf("redlatch: wait for %q: %w", l.name, err)
}

func (l *Latch) channel() string { return wire.LatchChannel(l.key) }

// check returns why no operation on the latch can work, or nil.
func (l *Latch) check(ctx context.Context) error {
	if l.err != nil {
		return l.err
	}
	return l.s.Check(ctx)
}

const (
	// patience is for how long a request is tried that the server cannot serve.
	patience = 5 * time.Second
	minPause = 20 * time.Millisecond
	maxPause = time.Second
)

// exec runs a script that must not run twice: it is sent again only after an error that
// says that nothing was done. The texts are what it is to do, and what then may have
// become of the count.
func (l *Latch) exec(ctx context.Context, script *wire.Script, what, may string, args ...string) (int, error) {
	if err := l.check(ctx); err != nil {
		return 0, err
	}
	if ctx.Err() != nil { // nothing is sent
		return 0, fmt.Errorf("redlatch: %s %q: %w", what, l.name, context.Cause(ctx))
	}
	began := time.Now()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		n, err := l.send(ctx, script, args)
		if err == nil {
			return n, nil
		}
		outcome := wire.OutcomeOf(err)
		if outcome == wire.Unknown {
			return 0, fmt.Errorf("%w: %s %q: the count may or may not %s: %w", lock.ErrIndeterminate, what, l.name, may, l.with(ctx, err))
		}
		if outcome == wire.Passing && time.Since(began)+pause <= patience {
			select {
			case <-time.After(pause):
				continue
			case <-ctx.Done():
				err = errors.Join(context.Cause(ctx), err)
			case <-l.s.Done():
				err = errors.Join(lock.ErrClosed, err)
			}
		}
		return 0, fmt.Errorf("redlatch: %s %q: %w", what, l.name, err)
	}
}

func (l *Latch) send(ctx context.Context, script *wire.Script, args []string) (int, error) {
	ctx, cancel := l.s.Bounded(ctx)
	defer cancel()
	n, err := script.Exec(ctx, l.s.Client, []string{l.key, wire.LatchRound(l.key)}, args).AsInt64()
	return int(min(n, math.MaxInt)), err
}

// with joins to the error of a request why it may have been given up.
func (l *Latch) with(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return errors.Join(l.s.Err(), err)
}
