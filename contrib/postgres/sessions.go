package pglock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/redlatch/redlatch/lock"
)

// attempt is an attempt to connect for several callers.
type attempt struct {
	over chan struct{} // closed when err is set
	err  error
}

// tend keeps the sessions.
func (d *advisory) tend() {
	ticker := time.NewTicker(d.config.ttl / 20)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			for _, s := range d.list() {
				s.tend(now)
				if s.givenUp.Load() && s.waiting() {
					d.unblock(s) // the first one may have come before the request
				}
			}
		case <-d.ctx.Done():
			return
		}
	}
}

func (d *advisory) list() []*session {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]*session, 0, len(d.sessions))
	for s := range d.sessions {
		all = append(all, s)
	}
	return all
}

// shared returns the main session, which it connects if there is none. It blocks until that is done or ctx ends.
func (d *advisory) shared(ctx context.Context) (*session, error) {
	d.mu.Lock()
	if s := d.main; s != nil {
		d.mu.Unlock()
		return s, nil
	}
	if d.closed {
		d.mu.Unlock()
		return nil, lock.ErrClosed
	}
	a := d.connecting
	if a == nil {
		a = &attempt{over: make(chan struct{})}
		d.connecting = a
		d.work.Go(func() { d.connectMain(a) })
	}
	d.mu.Unlock()

	select {
	case <-a.over:
	case <-ctx.Done():
		return nil, unavailable(errors.New("the connection was not made in time"))
	}
	if a.err != nil {
		return nil, a.err
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.main == nil {
		return nil, unavailable(errors.New("the connection was lost"))
	}
	return d.main, nil
}

func (d *advisory) connectMain(a *attempt) {
	s, err := d.connect(d.ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if err := verify(ctx, conn); err != nil {
			return err
		}
		return prepare(ctx, conn)
	}, d.sessionEnded, nil)

	d.mu.Lock()
	defer d.mu.Unlock()
	d.connecting = nil
	a.err = err
	if err == nil && d.addLocked(s) {
		d.main = s
	}
	close(a.over)
}

// addLocked adds a session that has been made, and reports whether it is of use.
func (d *advisory) addLocked(s *session) bool {
	if s.ended() != nil {
		return false
	}
	d.sessions[s] = struct{}{} // Close waits for the work that has made it, and ends it
	return true
}

// verify takes a lock and looks whether the server has it: some servers that speak the protocol do nothing.
func verify(ctx context.Context, conn *pgx.Conn) error {
	const probe = 0x7265646c61746368
	var granted, kept bool
	if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock_shared($1)`, pgx.QueryExecModeExec, int64(probe)).Scan(&granted); err != nil {
		return err
	}
	if !granted {
		return nil // a program has it, so there are such locks
	}
	err := conn.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`,
		pgx.QueryExecModeExec).Scan(&kept)
	if err != nil {
		return err
	}
	if !kept {
		return fmt.Errorf("%w: the server does not keep advisory locks", lock.ErrUnsupported)
	}
	_, err = conn.Exec(ctx, `SELECT pg_advisory_unlock_shared($1)`, pgx.QueryExecModeExec, int64(probe))
	return err
}

func prepare(ctx context.Context, conn *pgx.Conn) error {
	for name, sql := range advisoryQueries {
		if _, err := conn.PgConn().Prepare(ctx, string(name), sql, nil); err != nil {
			return err
		}
	}
	return nil
}

// sessionEnded is called when a session has ended: its claims are lost.
func (d *advisory) sessionEnded(s *session, err error) {
	d.mu.Lock()
	s.gone = true
	if d.main == s {
		d.main = nil
	}
	delete(d.sessions, s)
	for i, other := range d.idle {
		if other == s {
			d.idle = append(d.idle[:i:i], d.idle[i+1:]...)
			break
		}
	}
	claims := s.claims
	s.claims = nil
	d.mu.Unlock()

	reason := lock.ReasonGone
	if err == errSilent {
		reason = lock.ReasonExpired
	}
	for c := range claims {
		c.lost(reason, storeError{err})
		c.gate.leave(nil)
	}
}

// hasWaiter reports whether the claim has a session to wait on, or gets one that is idle. There are such sessions while
// locks are contended: then it saves a request not to try first.
func (d *advisory) hasWaiter(c *advisoryClaim) bool {
	if c.on != nil {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c.on = d.idleLocked()
	return c.on != nil
}

func (d *advisory) idleLocked() *session {
	n := len(d.idle)
	if n == 0 {
		return nil
	}
	s := d.idle[n-1]
	d.idle = d.idle[:n-1]
	s.users++
	return s
}

// waiter returns a session without users, or nil if there is none: waiters ask again then.
func (d *advisory) waiter(ctx context.Context) *session {
	d.mu.Lock()
	if s := d.idleLocked(); s != nil {
		d.mu.Unlock()
		return s
	}
	if d.closed || len(d.sessions)+d.dialing >= d.conns {
		d.mu.Unlock()
		return nil
	}
	d.dialing++
	d.work.Add(1)
	d.mu.Unlock()
	defer d.work.Done()

	s, err := d.connect(ctx, prepare, d.sessionEnded, nil)

	d.mu.Lock()
	defer d.mu.Unlock()
	d.dialing--
	if err != nil || !d.addLocked(s) {
		return nil
	}
	s.users++
	return s
}

// unblock ends the request that waits on a session.
func (d *advisory) unblock(s *session) {
	d.mu.Lock()
	main := d.main
	d.mu.Unlock()
	end := func() { s.end(errors.New("a request was given up")) } // the server notices within a quarter of the TTL
	sent := main != nil && main.send(cancelWait, int64(s.pid), func(a answer) {
		if a.err != nil && s.givenUp.Load() {
			end()
		}
	}) != nil
	if !sent {
		end()
	}
}

// free ends the use of a session, which may be nil.
func (d *advisory) free(s *session) {
	if s == nil {
		return
	}
	d.mu.Lock()
	s.users--
	spare := s.users == 0 && !s.gone && s != d.main
	keep := spare && len(d.idle) < maxIdle
	if keep {
		d.idle = append(d.idle, s)
	}
	d.mu.Unlock()
	if spare && !keep {
		s.terminate()
	}
}

// Close implements driver.Driver.
func (d *advisory) Close() {
	d.mu.Lock()
	d.closed = true
	var claims []*advisoryClaim
	for s := range d.sessions {
		for c := range s.claims {
			claims = append(claims, c)
		}
		s.claims = nil
	}
	d.mu.Unlock()
	for _, c := range claims {
		c.lost(lock.ReasonClosed, nil)
	}
	d.cancel()
	d.work.Wait()

	all := d.list()
	for _, s := range all {
		if s.waiting() {
			d.unblock(s)
		}
	}
	for _, s := range all {
		s.terminate()
	}
	late := time.NewTimer(2 * time.Second)
	defer late.Stop()
	for _, s := range all {
		select {
		case <-s.read: // the server has released the locks
		case <-late.C:
			late.Reset(0)
		}
		s.end(lock.ErrClosed)
		<-s.read
	}
}
