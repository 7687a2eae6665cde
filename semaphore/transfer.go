package semaphore

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Adopt returns a Permit of what Permit.Detach has left under that id, in this process or another
// one. It has the same number of permits, under new ids. Exactly one of several callers succeeds. For
// the others, and if the lease of the detached permit is over or one of several permits was released,
// the error matches lock.ErrNotHeld. For a malformed id it matches lock.ErrInvalid. ctx and the options
// have the same meaning as for TryAcquire. Adopt blocks for one round trip. If the error matches
// lock.ErrIndeterminate, the permit can soon be adopted under the same id again, for the lease that
// this call requested. If the client is closed during the call, the permit may be released.
func (s *PermitSemaphore) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (*Permit, error) {
	o, err := resolve(opts)
	from, idErr := parseDetachedID(id)
	if err := cmp.Or(err, idErr, s.check(ctx)); err != nil {
		return nil, s.object().Refused("adopt", err)
	}

	began := time.Now()
	if ctx.Err() != nil {
		return nil, s.failed(ctx, "adopt", began, lock.ErrUnavailable)
	}
	if !s.s.Enter() {
		return nil, s.object().Refused("adopt", lock.ErrClosed)
	}
	defer s.s.Leave()

	r := &request{site: callsite.Of(o.Site), grant: grant{permits: len(from), ids: newIDs(len(from)), lease: s.lease(o)}}
	if err := s.adopt(ctx, from, r); err != nil {
		return nil, s.failed(ctx, "adopt", began, err)
	}

	return s.newPermit(engine.HoldParent(ctx, o), r, o), nil
}

// adopt has a request take over permits with these ids. A transfer without an answer is repeated
// until ctx ends, and then undone, so that they can be adopted again.
func (s *PermitSemaphore) adopt(ctx context.Context, from []string, r *request) error {
	g := r.grant
	seq := s.slots.next()
	reply, outcome, err := s.retry(ctx, patience, seq, permitTransferScript, transferArgs(from, g.ids, g.lease, false))
	r.sent = seq.sent
	if err != nil && outcome == wire.Unknown {
		over := endOf(r.sent, g.lease)
		s.repeat(seq, permitTransferScript, func() []string { return transferArgs(g.ids, from, leaseUntil(over), true) }, func([]int64) {})
		return errors.Join(lock.ErrIndeterminate, err)
	}

	s.slots.done(seq)
	if err != nil {
		return err
	}
	if reply[0] != 1 {
		return fmt.Errorf("%w: no detached permit has this id", lock.ErrNotHeld)
	}
	if s.s.Err() != nil {
		err = lock.ErrClosed
	} else if time.Since(r.sent) >= g.lease { // this process was suspended until the lease was over
		err = lock.ErrNotAcquired
	}

	if err != nil {
		s.giveBack([]grant{g})
	}
	return err
}

// leave moves permits to other ids, which no Permit has, and reports whether all of them were
// acquired. If the server does not answer, the request is repeated in the background, and leaves them
// until over at most: Adopt may have looked for them in vain by then.
func (s *PermitSemaphore) leave(ctx context.Context, from, to []string, lease time.Duration, over time.Time) (moved bool, err error) {
	until := time.Now().Add(lease)
	seq := s.slots.next()
	reply, outcome, err := s.retry(ctx, patience, seq, permitTransferScript, transferArgs(from, to, lease, false))
	if err != nil && outcome != wire.Refused {
		if over.IsZero() || until.Before(over) {
			over = until
		}
		s.repeat(seq, permitTransferScript, func() []string { return transferArgs(from, to, leaseUntil(over), false) }, func([]int64) {})
		return false, ended(err, outcome)
	}

	if err == nil {
		moved = reply[0] == 1
	}
	s.slots.done(seq)
	return moved, err
}

// endOf returns when a lease ends that began then, the zero time for one without an end.
func endOf(began time.Time, lease time.Duration) time.Time {
	if lease == forever {
		return time.Time{}
	}
	return began.Add(lease)
}

// leaseUntil returns the lease from now that ends then.
func leaseUntil(end time.Time) time.Duration {
	if end.IsZero() {
		return forever
	}
	return max(time.Until(end), time.Millisecond)
}

func transferArgs(from, to []string, lease time.Duration, undo bool) []string {
	return slices.Concat([]string{wire.Flag(undo), leaseArg(lease)}, from, to)
}

// detachedID returns the id of detached permits, of which the first one identifies all. It differs
// from the id of a permit, so that nobody adopts what others hold.
func detachedID(raw []string) string {
	return hex.EncodeToString([]byte(raw[0])) + countSeparator + strconv.Itoa(len(raw))
}

const countSeparator = "#"

func parseDetachedID(id string) (raw []string, err error) {
	digits, count, _ := strings.Cut(id, countSeparator)
	first, err := hex.DecodeString(digits)
	n, countErr := strconv.Atoi(count)
	if err := cmp.Or(err, countErr, checkCount(n, 1, MaxBatch)); err != nil || len(first) != idSize {
		return nil, fmt.Errorf("%w: %q is not the id of a detached permit", lock.ErrInvalid, id)
	}
	return consecutive(string(first), n), nil
}
