package etcdlock

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/redlatch/redlatch/lock"
)

// lease is a lease of etcd. While a claim is certain, etcd has all its leases.
type lease struct {
	id   clientv3.LeaseID
	ttl  time.Duration
	kept bool // it is renewed
	own  bool // it belongs to a single claim

	// ctx ends with the lease, and when the store closes.
	ctx context.Context
	end context.CancelFunc

	// The mutex of the store guards what follows.
	until    time.Time // until when etcd has the lease for certain
	renewal  time.Time // when it is renewed, or tried again
	renewing bool
	err      error // of the last renewal, nil if it was confirmed
	claims   map[*claim]struct{}
	slots    slots               // of a session
	retired  map[string]struct{} // keys that etcd may make yet, and that no claim has
}

// early is how long before the end of a lease its claims end. At the end, the client of package driver would end them
// without the error that has prevented the renewal.
const early = 10 * time.Millisecond

// grant requests a lease of at least ttl, which etcd rounds up to whole seconds and to its own least TTL. Nothing is
// attached to a lease whose reply was lost, so it does no harm until it expires.
func (s *store) grant(ctx context.Context, failFast bool, ttl time.Duration) (*lease, error) {
	l, _, err := call(ctx, s, failFast, func(ctx context.Context) (*lease, error) {
		sent := time.Now()
		granted, err := s.c.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
		if err != nil {
			return nil, err
		}
		length := time.Duration(granted.TTL) * time.Second
		return &lease{id: granted.ID, ttl: length, until: sent.Add(length), renewal: s.renewal(sent, length)}, nil
	})
	if err != nil {
		return nil, as(lock.ErrUnavailable, err)
	}
	l.ctx, l.end = context.WithCancel(s.ctx)
	l.claims = make(map[*claim]struct{})
	l.slots = make(slots)
	l.retired = make(map[string]struct{})
	return l, nil
}

// current returns the lease for new claims. It waits for one until ctx ends, or with failFast until an attempt to get one
// has failed.
func (s *store) current(ctx context.Context, failFast bool) (*lease, error) {
	for {
		if s.ctx.Err() != nil {
			return nil, lock.ErrClosed
		}
		s.mu.Lock()
		l := s.session
		failed := s.failed
		changed := s.changed
		s.mu.Unlock()
		if l != nil {
			return l, nil
		}
		if failed != nil && (failFast || !again(failed)) {
			return nil, failed
		}

		select {
		case <-changed:
		case <-s.ctx.Done():
			return nil, lock.ErrClosed
		case <-ctx.Done():
			if failed == nil {
				failed = errors.Join(lock.ErrUnavailable, errNoAnswer)
			}
			return nil, failed
		}
	}
}

// run renews and ends leases when that is due, until the store closes.
func (s *store) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(time.Until(s.tick()))
		select {
		case <-timer.C:
		case <-s.wake:
		case <-s.ctx.Done():
			return
		}
	}
}

// rouse has run look at the leases again.
func (s *store) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// tick begins what is due and returns when something is due again.
func (s *store) tick() (next time.Time) {
	s.mu.Lock()
	now := time.Now()
	next = now.Add(s.ttl)
	at := func(t time.Time) {
		if t.Before(next) {
			next = t
		}
	}
	for l := range s.leases {
		if !l.kept || l.ctx.Err() != nil {
			continue // the client of package driver ends the claim, or it has ended
		}
		end := l.until.Add(-early)
		if !now.Before(end) {
			s.endLocked(l, lock.ReasonExpired, l.err)
			continue
		}
		at(end)
		if l.renewing {
			continue
		}
		if now.Before(l.renewal) {
			at(l.renewal)
			continue
		}
		l.renewing = true
		s.goLocked(func() { s.renew(l) })
	}

	if s.session == nil && !s.opening {
		if now.Before(s.opens) {
			at(s.opens)
		} else {
			s.opening = true
			s.goLocked(s.open)
		}
	}
	s.mu.Unlock()
	return next
}

// open gets a lease for new claims.
func (s *store) open() {
	l, err := s.grant(s.ctx, true, s.ttl)
	if err != nil {
		s.reconnect()
	}

	s.mu.Lock()
	s.opening = false
	s.failed = err
	if err == nil {
		s.pause = minPause
		s.useLocked(l)
	} else {
		s.opens = time.Now().Add(s.pause)
		s.pause = min(2*s.pause, maxPause)
	}
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()
	s.rouse()
}

// useLocked has new claims get that lease.
func (s *store) useLocked(l *lease) {
	l.kept = true
	s.session = l
	s.leases[l] = struct{}{}
}

// renew renews a lease, and checks what etcd has with it.
func (s *store) renew(l *lease) {
	s.mu.Lock()
	members := 1
	if l.err != nil {
		members = 2 // as call does
	}
	s.mu.Unlock()
	r, err := ask(l.ctx, s, true, s.timeout, members, s.keepAlive(l))
	if err == nil {
		s.prolong(l, r)
	}

	s.mu.Lock()
	l.renewing = false
	l.err = err
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		s.endLocked(l, lock.ReasonGone, err)
	} else if err != nil {
		l.renewal = time.Now().Add(s.timeout / 4)
	}
	s.mu.Unlock()

	if err != nil {
		s.reconnect()
	}
	s.rouse()
	if err == nil {
		s.audit(l)
	}
}

// renewed is a renewal that etcd has confirmed.
type renewed struct {
	sent time.Time
	ttl  time.Duration
}

// keepAlive returns the request that renews a lease.
func (s *store) keepAlive(l *lease) func(ctx context.Context) (renewed, error) {
	return func(ctx context.Context) (renewed, error) {
		sent := time.Now()
		// KeepAliveOnce repeats at once what a member without a leader has refused. Without the metadata such a
		// member waits for a leader instead.
		kept, err := s.c.KeepAliveOnce(metadata.NewOutgoingContext(ctx, nil), l.id)
		if err != nil {
			return renewed{}, err
		}
		return renewed{sent, time.Duration(kept.TTL) * time.Second}, nil
	}
}

// prolong notes a renewal.
func (s *store) prolong(l *lease, r renewed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if until := r.sent.Add(r.ttl); until.After(l.until) {
		l.until = until
	}
	l.renewal = s.renewal(r.sent, r.ttl)
}

// renewal returns when to renew a lease. A lease that is longer than the TTL is renewed as often as the session, because its
// keys are audited then.
func (s *store) renewal(sent time.Time, ttl time.Duration) time.Time {
	return sent.Add(min(ttl, s.ttl) / 3)
}

// audit compares the keys that etcd has with a lease with the claims that have it. A claim whose key is gone is lost. A
// retired key was made by a request that arrived late, and is removed.
func (s *store) audit(l *lease) {
	s.mu.Lock()
	var held []*claim
	for c := range l.claims {
		if c.held {
			held = append(held, c)
		}
	}
	needed := len(held) > 0 || len(l.retired) > 0
	s.mu.Unlock()
	if !needed {
		return
	}

	attached, _, err := call(l.ctx, s, true, func(ctx context.Context) (*clientv3.LeaseTimeToLiveResponse, error) {
		return s.c.TimeToLive(ctx, l.id, clientv3.WithAttachedKeys())
	})
	if err != nil {
		return // the next one may get an answer
	}
	there := make(map[string]struct{}, len(attached.Keys))
	for _, key := range attached.Keys {
		there[string(key)] = struct{}{}
	}
	for _, c := range held {
		if _, ok := there[c.key]; !ok {
			c.confirm()
		}
	}
	for key := range there {
		s.mu.Lock()
		_, retired := l.retired[key]
		s.mu.Unlock()
		if retired {
			_, _, _ = call(l.ctx, s, true, func(ctx context.Context) (*clientv3.DeleteResponse, error) {
				return s.c.Delete(ctx, key)
			})
		}
	}
}

// endLocked ends a lease, and the claims that have it.
func (s *store) endLocked(l *lease, reason lock.Reason, err error) {
	if l.ctx.Err() != nil {
		return
	}
	l.end()
	if l == s.session {
		s.session = nil
	}

	// The holds end before anything is revoked: others may have the locks then.
	for c := range l.claims {
		if c.held {
			c.r.Lost(reason, cause(err))
		}
	}
	for c := range l.claims {
		c.dropLocked()
		if l.own {
			c.leaveSlotLocked(true) // the session may go on
		}
	}
	s.revokeLocked(l)
}

// gone ends a lease that etcd does not have.
func (s *store) gone(l *lease, err error) {
	s.mu.Lock()
	s.endLocked(l, lock.ReasonGone, err)
	s.mu.Unlock()
	s.rouse()
}

// revokeLocked revokes a lease in the background, until it expires by itself. All keys that have it go with it.
func (s *store) revokeLocked(l *lease) {
	l.end()
	s.leases[l] = struct{}{} // for Close
	s.goLocked(func() {
		ctx, cancel := context.WithTimeout(s.ctx, l.ttl+s.timeout)
		defer cancel()
		_, _, err := call(ctx, s, false, s.revoke(l))
		if s.ctx.Err() == nil || err == nil {
			s.mu.Lock()
			delete(s.leases, l)
			s.mu.Unlock()
		}
	})
}

// revoke returns the request that revokes a lease.
func (s *store) revoke(l *lease) func(ctx context.Context) (*clientv3.LeaseRevokeResponse, error) {
	return func(ctx context.Context) (*clientv3.LeaseRevokeResponse, error) { return s.c.Revoke(ctx, l.id) }
}
