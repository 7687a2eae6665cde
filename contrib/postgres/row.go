package pglock

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/redlatch/redlatch/lock"
)

// tableClaim is a claim of a Table.
type tableClaim struct {
	request
	d       *table
	gate    *gate[string] // nil for an attempt that does not wait
	lost    func(lock.Reason, error)
	lease   time.Duration
	renewed bool

	failFast bool

	// Of the request, until it is granted.
	gaveUp  time.Time     // when the client gives up the latest attempt, which the server then ignores, too
	doubt   time.Time     // until when an attempt whose reply was lost may still have an effect; zero without one
	refused bool          // by the latest answer
	queued  bool          // it may be in the queue
	place   int           // in the queue, from 1; 0 if it is not in it
	freeIn  time.Duration // until the lock is free; if negative, since then

	token int64
	// The mutex of the table guards what follows.
	until time.Time
	last  time.Time // the end of the longest lease that the server may have given it
	ended bool
}

// asks notes that the server may give the claim a lease until the client gives up the request.
func (c *tableClaim) asks(lease time.Duration, gaveUp time.Time) {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if last := gaveUp.Add(lease + margin(lease)); last.After(c.last) {
		c.last = last
	}
}

// end notes that the claim has ended, and reports whether that is new.
func (c *tableClaim) end() bool {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	ended := c.ended
	c.ended = true
	delete(c.d.claims, c)
	return !ended
}

// gone ends a claim that the server does not have.
func (c *tableClaim) gone() {
	if c.end() {
		c.lost(lock.ReasonGone, nil)
		c.leave()
	}
}

// leave lets the next waiter of the process go on. An earlier attempt may come late, and take the lock again.
func (c *tableClaim) leave() {
	if time.Now().Before(c.doubt) {
		c.d.remove(c)
	}
	if c.gate != nil {
		c.gate.leave(nil)
	}
}

// Token implements driver.Claim.
func (c *tableClaim) Token() int64 { return c.token }

// Until implements driver.Claim.
func (c *tableClaim) Until() time.Time {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	return c.until
}

// Extend implements driver.Claim.
func (c *tableClaim) Extend(ctx context.Context, lease time.Duration) error {
	sent := time.Now()
	found, err := c.extend(ctx, lease)
	if err != nil {
		return err
	}
	if !found {
		c.gone()
		return lock.ErrLost
	}

	c.lasts(sent, lease)
	return nil
}

// extend reports whether the server has the claim.
func (c *tableClaim) extend(ctx context.Context, lease time.Duration) (found bool, err error) {
	err = c.d.queryBy(ctx, c.d.sql.extend, func(pgx.Rows) error {
		found = true
		return nil
	}, func(gaveUp time.Time) []any {
		c.asks(lease, gaveUp)
		return []any{c.name, c.owner, seconds(lease)}
	})
	return found, err
}

// lasts notes that the server has given the claim that lease, with a request that was sent then.
func (c *tableClaim) lasts(sent time.Time, lease time.Duration) {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if until := sent.Add(lease); until.After(c.until) {
		c.until = until
	}
}

// Release implements driver.Claim.
func (c *tableClaim) Release(ctx context.Context) error {
	if !c.end() {
		return lock.ErrLost
	}
	defer c.leave()

	lostReply := false
	for {
		found, released, err := c.releaseOnce(ctx)
		if err == nil && (released || found && lostReply) {
			return nil
		}
		if err == nil && lostReply {
			return unknown(errors.New("the lock is gone after a reply was lost"))
		}
		if err == nil {
			return lock.ErrLost
		}

		lostReply = lostReply || errors.Is(err, lock.ErrIndeterminate)
		if temporary(err) {
			select {
			case <-time.After(retryPause / 4):
				continue
			case <-ctx.Done():
				err = unknown(err)
			}
		}
		c.d.remove(c)
		return err
	}
}

// releaseOnce reports whether it has released the lock, and whether it has found it as an earlier release has left it.
func (c *tableClaim) releaseOnce(ctx context.Context) (found, released bool, err error) {
	err = c.d.query(ctx, c.d.sql.release, func(row pgx.Rows) error {
		found = true
		return row.Scan(&released, nil)
	}, c.name, c.owner, c.d.sql.channel, c.token)
	return found, released, err
}

// cutShort returns the error of a request that has failed with err, perhaps because ctx has ended.
func (c *tableClaim) cutShort(ctx context.Context, err error) error {
	if errors.Is(err, lock.ErrIndeterminate) {
		c.doubt = c.gaveUp.Add(zombieTime)
	}
	if c.refused && ctx.Err() != nil && temporary(err) {
		return lock.ErrNotAcquired
	}
	c.refused = false
	return err
}
