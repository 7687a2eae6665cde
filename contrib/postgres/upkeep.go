package pglock

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/redlatch/redlatch/lock"
)

// leftover is what a request may have left on the server.
type leftover struct {
	until time.Time // when it ends by itself
	again time.Time // until when the server may still carry out a request
}

// zombieTime is how much later than the deadline of a request its effect may be seen: its transaction commits, and the client
// knows the clock of the server from an answer that has taken a while.
const zombieTime = time.Second

// giveUp has what a request may have left removed.
func (d *table) giveUp(c *tableClaim) {
	if !c.doubt.IsZero() || c.queued {
		d.remove(c)
	}
}

// remove has what the server may have of a claim removed.
func (d *table) remove(c *tableClaim) {
	d.mu.Lock()
	d.removeLocked(c)
	d.mu.Unlock()
	signal(d.kick)
}

func (d *table) removeLocked(c *tableClaim) {
	until := time.Now().Add(patience + d.ttl + margin(d.ttl)) // by a renewal that is under way
	if until.Before(c.last) {
		until = c.last
	}
	d.left[c.request] = leftover{until, c.doubt}
}

// tend renews the claims, and removes what is left.
func (d *table) tend() {
	ticker := time.NewTicker(d.ttl / 24)
	defer ticker.Stop()
	var renewed time.Time // when the latest attempt began
	pause := d.ttl / 3
	for {
		select {
		case <-ticker.C:
		case <-d.kick:
		case <-d.ctx.Done():
			return
		}

		if now := time.Now(); now.Sub(renewed) >= pause {
			renewed = now
			pause = d.ttl / 3
			if !d.renew() {
				pause = d.ttl / 12
			}
		}
		d.forget(d.ctx)
	}
}

// renewBatch is how many claims one statement renews.
const renewBatch = 1000

// renew renews the claims without a lease of their own. It reports false if another attempt has to follow soon.
func (d *table) renew() bool {
	d.mu.Lock()
	all := make([]*tableClaim, 0, len(d.claims))
	for c := range d.claims {
		if c.renewed {
			all = append(all, c)
		}
	}
	d.mu.Unlock()

	ok := true
	for len(all) > 0 && ok {
		n := min(len(all), renewBatch)
		ok = d.renewSome(all[:n])
		all = all[n:]
	}
	return ok
}

func (d *table) renewSome(claims []*tableClaim) bool {
	ctx, cancel := context.WithTimeout(d.ctx, d.ttl/4)
	defer cancel()
	names := make([]string, len(claims))
	owners := make([]string, len(claims))
	for i, c := range claims {
		names[i] = c.name
		owners[i] = c.owner
	}

	sent := time.Now()
	held := make(map[string]bool, len(claims))
	err := d.query(ctx, d.sql.renew, func(row pgx.Rows) error {
		var owner string
		err := row.Scan(&owner)
		held[owner] = true
		return err
	}, names, owners, seconds(d.ttl))
	if err != nil {
		return false
	}

	for _, c := range claims {
		if held[c.owner] {
			c.lasts(sent, d.ttl)
		} else {
			c.gone()
		}
	}
	return true
}

// forget removes what is left, and reports whether nothing is left then.
func (d *table) forget(ctx context.Context) bool {
	now := time.Now()
	var names, owners []string
	var last []bool
	d.mu.Lock()
	maps.DeleteFunc(d.left, func(_ request, l leftover) bool { return now.After(l.until) })
	for r, l := range d.left {
		if len(names) < renewBatch {
			names = append(names, r.name)
			owners = append(owners, r.owner)
			last = append(last, now.After(l.again))
		}
	}
	d.mu.Unlock()
	if len(names) == 0 {
		return true
	}

	ctx, cancel := context.WithTimeout(ctx, min(patience, d.ttl/4))
	defer cancel()
	if d.exec(ctx, d.sql.forget, names, owners, d.sql.channel, last) != nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range names {
		if last[i] {
			delete(d.left, request{names[i], owners[i]})
		}
	}
	return len(d.left) == 0
}

// listenFor keeps a session that listens for releases.
func (d *table) listenFor(direct dialer) {
	pause := retryPause
	for d.ctx.Err() == nil {
		s, err := direct.connect(d.ctx, func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, d.sql.listen, pgx.QueryExecModeExec)
			return err
		}, func(*session, error) {}, d.wake)
		if err == nil {
			d.setListener(s)
			d.tendListener(s)
			d.setListener(nil)
			pause = retryPause
		}
		if errors.Is(err, lock.ErrUnsupported) {
			return // waiters poll
		}
		select {
		case <-time.After(pause):
		case <-d.ctx.Done():
		}
		pause = min(2*pause, safetyPoll)
	}
}

// tendListener returns when the session has ended.
func (d *table) tendListener(s *session) {
	ticker := time.NewTicker(d.ttl / 20)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			s.tend(now)
		case <-s.read:
			return
		case <-d.ctx.Done():
			s.terminate()
			s.end(lock.ErrClosed)
			<-s.read
			return
		}
	}
}

// setListener notes what listens. All waiters look whether they have missed something.
func (d *table) setListener(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.listener = s
	for _, woken := range d.waiters {
		signal(woken)
	}
}

// wake wakes the waiter of that owner.
func (d *table) wake(owner string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if woken := d.waiters[owner]; woken != nil {
		signal(woken)
	}
}

func signal(woken chan<- struct{}) {
	select {
	case woken <- struct{}{}:
	default:
	}
}

// Close implements driver.Driver.
func (d *table) Close() {
	d.cancel()
	d.work.Wait()

	d.mu.Lock()
	claims := d.claims
	d.claims = make(map[*tableClaim]struct{})
	for c := range claims {
		c.ended = true
		d.removeLocked(c)
	}
	d.mu.Unlock()
	for c := range claims {
		c.lost(lock.ReasonClosed, nil)
	}

	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	for !d.forget(ctx) {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
}

// closePatience bounds how long Close tries to remove what is left.
const closePatience = 3 * time.Second
