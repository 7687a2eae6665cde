package zklock

import (
	"context"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/redlatch/redlatch/lock"
)

// beats is how many times in a session timeout the session is confirmed, while there are claims.
const beats = 5

// minPatience is the least patience. go-zookeeper pauses for a second if there is no other server, so less would not help.
const minPatience = time.Second

// patience returns how long a server may take to confirm the session before it is left for the next server. Calls that do
// not wait have no more either.
func patience(now sessionState) time.Duration { return max(now.timeout/beats, minPatience) }

// never is later than anything that keep waits for.
const never = 24 * time.Hour

// pulse is when the session is confirmed.
type pulse struct {
	next    time.Time  // when the next confirmation is due
	answer  chan error // of the one that is under way, or nil
	overdue time.Time  // when a server that has not answered is left
}

// keep confirms the session as long as there are claims, and ends those that are over.
func (s *store) keep() {
	defer close(s.kept)
	timer := time.NewTimer(never)
	defer timer.Stop()

	var (
		p                 pulse
		claims, connected bool
		failed            error // of the latest confirmation
	)
	for {
		now, changed := s.session.state()
		certain, some := s.expire(now, failed)
		if some && !claims {
			p.next = time.Now().Add(now.timeout / beats) // the creation of the first has confirmed the session
		}
		if now.connected && !connected {
			p.overdue = time.Now().Add(patience(now)) // what is under way was sent now at the earliest
		}
		claims, connected = some, now.connected

		wait := never
		if claims && connected {
			wait = s.confirmInTime(&p, now)
		}
		if left := time.Until(certain); claims && left > 0 {
			wait = min(wait, left)
		}
		timer.Reset(wait)
		select {
		case failed = <-p.answer:
			p.answer = nil
			if failed != nil {
				p.next = time.Now().Add(retryPause)
			}
		case <-changed:
		case <-s.wake:
		case <-timer.C:
		case <-s.ctx.Done():
			return
		}
	}
}

// confirmInTime begins the next confirmation if it is due, or leaves a server that has not answered. It returns the time
// until it has to be called again.
func (s *store) confirmInTime(p *pulse, now sessionState) time.Duration {
	began := time.Now()
	if p.answer == nil && !began.Before(p.next) {
		answer := make(chan error, 1)
		go func() { answer <- s.beat(now) }()
		*p = pulse{next: began.Add(now.timeout / beats), answer: answer, overdue: began.Add(patience(now))}
	} else if p.answer != nil && !began.Before(p.overdue) {
		s.session.cut()
		p.overdue = began.Add(patience(now))
	}

	if p.answer != nil {
		return p.overdue.Sub(began)
	}
	return p.next.Sub(began)
}

// expire ends the claims of earlier sessions, and those that are not certain any more. failed is why the session was not
// confirmed, if that is known. It returns until when the others are certain, and whether there are some.
func (s *store) expire(now sessionState, failed error) (certain time.Time, some bool) {
	type end struct {
		c      *claim
		reason lock.Reason
		err    error
	}
	var ended []end

	s.ending.Lock()
	defer s.ending.Unlock()
	s.mu.Lock()
	certain = s.certainLocked(now)
	over := !time.Now().Before(certain)
	for _, c := range s.claims {
		if c.session > now.number {
			continue // now is old by now
		}
		held := c.held
		if c.session != now.number {
			c.endLocked(errRemoved)
			if held {
				ended = append(ended, end{c, lock.ReasonGone, sessionEnd(now)})
			}
		} else if over && held {
			c.endLocked(lock.ErrLost)
			ended = append(ended, end{c, lock.ReasonExpired, failed})
		} else if over && c.r.FailFast {
			c.endLocked(errSilent)
			ended = append(ended, end{c, "", nil})
		}
	}
	some = len(s.claims) > 0
	s.mu.Unlock()

	for _, e := range ended {
		// The hold ends before its node is removed: others may have the lock then.
		if e.reason != "" {
			e.c.r.Lost(e.reason, e.err)
		}
		if e.c.session == now.number {
			s.leave(leftover{path: e.c.path, session: e.c.session})
		}
	}
	return certain, some
}

// sessionEnd returns why the session before this one has ended.
func sessionEnd(now sessionState) error {
	if now.closed {
		return zk.ErrClosing
	}
	return zk.ErrSessionExpired
}

// maxBeat bounds the paths in one request, in bytes. A server refuses requests of more than a megabyte.
const maxBeat = 128 * 1024

// beat confirms the session, and that the nodes of its claims exist, and those that they wait for.
func (s *store) beat(now sessionState) error {
	_, changed := s.session.state()
	var paths []string
	s.mu.Lock()
	for path, c := range s.claims {
		if c.session == now.number {
			paths = append(paths, path)
		}
	}
	for path, w := range s.watches {
		if s.claims[path] == nil && w.changed == changed && !w.over() {
			paths = append(paths, path)
		}
	}
	s.mu.Unlock()

	for len(paths) > 0 {
		n := 0
		for size := 0; n < len(paths) && size < maxBeat; n++ {
			size += len(paths[n])
		}
		if err := s.confirmAll(now, paths[:n]); err != nil {
			return err
		}
		paths = paths[n:]
	}
	return nil
}

// confirmAll confirms the session and that those nodes exist. Of the others it ends the claims.
func (s *store) confirmAll(now sessionState, paths []string) error {
	for len(paths) > 0 {
		missing, err := s.check(s.ctx, now, paths...)
		if err != nil || missing == nil {
			return err
		}
		i := missing[0]
		s.missing(paths[i])
		paths = append(append([]string(nil), paths[:i]...), paths[i+1:]...)
	}
	return nil
}

// missing ends the claim of a node that does not exist, unless its release has removed that. A node that a claim waits for was
// removed by others, and the server has said so before. If it has not, it shows a node that the others do not have, and will
// never say so: servers of some versions miss transactions when they start again. The client leaves it for the next one.
func (s *store) missing(path string) {
	s.mu.Lock()
	c := s.claims[path]
	if c != nil {
		c.endLocked(errRemoved)
	}
	w := s.watches[path]
	shown := c == nil && w != nil && w.shows()
	s.mu.Unlock()

	if c != nil && c.held {
		c.r.Lost(lock.ReasonGone, zk.ErrNoNode)
	}
	if shown {
		s.session.cut()
	}
}

// leftover is what has to be removed: a node, or what a request without an answer may have created.
type leftover struct {
	path    string
	session uint64 // of the node

	folder, name string          // of nodes whose names begin with it
	after        <-chan struct{} // closed when the request has returned; or nil
}

// leave removes a leftover in the background.
func (s *store) leave(l leftover) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.work.Add(1)
		go s.clean(l)
	}
}

// clean removes a leftover. It tries until that is gone or its session has ended. If the server refuses it, an operator may
// give back the right.
func (s *store) clean(l leftover) {
	defer s.work.Done()
	if l.after != nil {
		select {
		case <-l.after:
		case <-s.ctx.Done():
			return
		}
	}
	if l.path == "" {
		now, _ := s.session.state()
		l.session = now.number // a later one has nothing of the request
	}

	for {
		now, err := s.ready(s.ctx, false)
		if err != nil || now.number != l.session {
			return
		}
		if l.path != "" {
			_, err = s.remove(s.ctx, l.path)
		} else {
			err = s.search(s.ctx, now, l)
		}
		if err == nil || s.ctx.Err() != nil {
			return
		}
		again := retryPause
		if isRefusal(err) {
			again = refusedPause
		}
		pause(s.ctx, again)
	}
}

// search removes the nodes of a leftover, and its folder if that is empty. A request of an earlier connection has been
// carried out by now or never will be: when a session moves to a new connection, the server closes the old one, and the
// leader refuses what another server still has for it.
func (s *store) search(ctx context.Context, now sessionState, l leftover) error {
	// A server may not have seen yet what another has done, and a leader that the others have left answers a Sync. But only
	// the leader that a majority follows confirms a write, after all that was written before.
	missing, err := s.check(ctx, now, l.folder)
	if err != nil || missing != nil {
		return err
	}
	names, err := s.children(ctx, l.folder)
	if err == zk.ErrNoNode {
		return nil
	}
	if err != nil {
		return err
	}

	for _, name := range names {
		if !strings.HasPrefix(name, l.name) {
			continue
		}
		if _, err := s.remove(ctx, l.folder+"/"+name); err != nil {
			return err
		}
	}
	if len(names) == 0 {
		_, err = s.remove(ctx, l.folder)
	}
	return err
}
