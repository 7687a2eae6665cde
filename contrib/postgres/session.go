package pglock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// session is a connection of its own, on which several callers make requests. They are sent without waiting for the answers
// to earlier ones. So a caller that leaves does not break the connection, which has the locks of others.
//
// A caller that waits for its answer reads, if nobody else does, and passes the answers of others on: no other goroutine
// has to wake up first. When the session has been quiet for a moment a goroutine reads, which learns at once that the server
// has ended the session.
type session struct {
	conn  net.Conn
	raw   net.Conn // below TLS: to close it never blocks
	front *pgproto3.Frontend
	pid   uint32
	ttl   time.Duration

	onEnd    func(*session, error)
	onNotify func(payload string)
	reader   chan struct{} // has a token while nobody reads
	partial  answer        // what was read of an answer; only the reader uses it
	read     chan struct{} // closed when nothing more is read
	givenUp  atomic.Bool   // the request that waits on it

	// When the latest request with an answer was sent. It is read without the mutex, which a request may have while it blocks.
	confirmed atomic.Pointer[time.Time]

	mu        sync.Mutex
	err       error   // why the session has ended
	pending   []*call // that have no answer, in the order in which they were sent
	sent      time.Time
	writable  time.Time // the deadline for writing
	unblocked time.Time // when the answer to the latest request that waits came

	// The mutex of the advisory guards what follows.
	users  int // requests that wait on it, and claims
	claims map[*advisoryClaim]struct{}
	gone   bool
}

// call is a request.
type call struct {
	q    query
	sent time.Time

	// The mutex of the session guards what follows.
	answered func(answer) // called once, on the goroutine that reads, unless it is nil; it does not block
	over     bool         // it is called, or will be
}

// answer is the answer to a request.
type answer struct {
	sent  time.Time
	value string
	err   error // of the server; errSession if the session has ended without an answer
}

// errSession is matched by the errors of a session that has ended.
var errSession = errors.New("the session has ended")

// errSilent ends a session whose server has not answered for its TTL.
var errSilent = errors.New("the server does not answer")

// query is the name of a prepared statement, or ping.
type query string

const (
	ping         query = ""
	tryLock      query = "redlatch_try"
	tryShared    query = "redlatch_try_shared"
	waitLock     query = "redlatch_wait"
	waitShared   query = "redlatch_wait_shared"
	unlock       query = "redlatch_unlock"
	unlockShared query = "redlatch_unlock_shared"
	unlockAll    query = "redlatch_unlock_all"
	cancelWait   query = "redlatch_cancel"
)

// yes is the answer of a function that returns true.
const yes = "t"

var advisoryQueries = map[query]string{
	tryLock:      "SELECT pg_try_advisory_lock($1::bigint)",
	tryShared:    "SELECT pg_try_advisory_lock_shared($1::bigint)",
	waitLock:     "SELECT pg_advisory_lock($1::bigint)",
	waitShared:   "SELECT pg_advisory_lock_shared($1::bigint)",
	unlock:       "SELECT pg_advisory_unlock($1::bigint)",
	unlockShared: "SELECT pg_advisory_unlock_shared($1::bigint)",
	unlockAll:    "SELECT pg_advisory_unlock_all() WHERE $1::bigint = 0",
	cancelWait:   "SELECT pg_cancel_backend($1::bigint::int)",
}

// waits reports whether the answer waits for other sessions.
func (q query) waits() bool { return q == waitLock || q == waitShared }

// doubtful reports whether a session may have a lock after that error that no claim has. Only its end releases that. This
// client cancels requests that wait, and others may be cancelled by hand, or by a cancellation that comes late.
func (q query) doubtful(pg *pgconn.PgError) bool {
	switch q {
	case unlock, unlockShared, unlockAll:
		return true
	case tryLock, tryShared:
		return pg.Code == codeCanceled
	default:
		return false
	}
}

// send sends a request, and returns nil if the session has ended. It blocks for two writeTimeouts at most.
func (s *session) send(q query, arg int64, answered func(answer)) *call {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return nil
	}

	if q != ping {
		s.front.SendBind(&pgproto3.Bind{
			PreparedStatement: string(q), ParameterFormatCodes: []int16{pgx.BinaryFormatCode},
			Parameters: [][]byte{binary.BigEndian.AppendUint64(nil, uint64(arg))},
		})
		s.front.SendExecute(&pgproto3.Execute{})
	}
	s.front.SendSync(&pgproto3.Sync{})

	s.sent = time.Now()
	c := &call{q: q, sent: s.sent, answered: answered}
	s.pending = append(s.pending, c)
	if s.writable.Before(s.sent.Add(writeTimeout)) { // seldom: it may wake another thread
		s.writable = s.sent.Add(2 * writeTimeout)
		_ = s.conn.SetWriteDeadline(s.writable)
	}
	err := s.front.Flush()
	s.mu.Unlock()
	if err != nil {
		s.end(err)
	}
	return c
}

// ask sends a request whose answer comes to a channel. The call is nil if the session has ended.
func (s *session) ask(q query, arg int64) (*call, <-chan answer) {
	answers := make(chan answer, 1)
	return s.send(q, arg, func(a answer) { answers <- a }), answers
}

// await waits for an answer, and reports false if ctx ends before.
func (s *session) await(ctx context.Context, answers <-chan answer) (answer, bool) {
	select {
	case a := <-answers:
		return a, true
	case <-ctx.Done():
		return answer{}, false
	case <-s.reader:
	}
	defer func() { s.reader <- struct{}{} }()

	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = s.conn.SetReadDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	defer func() {
		if !stop() {
			<-interrupted
			_ = s.conn.SetReadDeadline(time.Time{})
		}
	}()
	for {
		select {
		case a := <-answers:
			return a, true
		default:
		}
		err := s.receive()
		if err == nil {
			continue
		}
		if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			return answer{}, false
		}
		s.end(err)
		return <-answers, true
	}
}

// leave has f called with the answer to a call, unless it has arrived. Then it reports false.
func (s *session) leave(c *call, f func(answer)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.over {
		return false
	}
	c.answered = f
	return true
}

// quiet is after what time without a request a goroutine reads.
const quiet = time.Millisecond

// watch reads while nobody waits for an answer, until the session ends.
func (s *session) watch() {
	defer close(s.read)
	for s.ended() == nil {
		if s.used() {
			time.Sleep(quiet)
			continue
		}
		<-s.reader
		if err := s.receive(); err != nil {
			s.end(err)
		}
		s.reader <- struct{}{}
	}
	<-s.reader
}

// used reports whether there was a request a moment ago.
func (s *session) used() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.sent) < quiet
}

// receive reads a message.
func (s *session) receive() error {
	m, err := s.front.Receive()
	if err != nil {
		return err
	}

	switch m := m.(type) {
	case *pgproto3.DataRow:
		if len(m.Values) > 0 {
			s.partial.value = string(m.Values[0])
		}
	case *pgproto3.ErrorResponse:
		pg := pgconn.ErrorResponseToPgError(m)
		s.partial.err = pg
		if ends(pg) {
			s.end(pg)
		}
	case *pgproto3.NotificationResponse:
		if s.onNotify != nil {
			s.onNotify(m.Payload)
		}
	case *pgproto3.ReadyForQuery:
		a := s.partial
		s.partial = answer{}
		s.answer(a)
	}
	return nil
}

// answer passes an answer on.
func (s *session) answer(a answer) {
	s.mu.Lock()
	if len(s.pending) == 0 {
		s.mu.Unlock()
		return
	}
	c := s.pending[0]
	s.pending = s.pending[1:]
	c.over = true
	s.confirmed.Store(&c.sent)
	if c.q.waits() {
		s.unblocked = time.Now()
	}
	s.mu.Unlock()

	if pg := serverError(a.err); pg != nil && c.q.doubtful(pg) {
		s.end(pg)
	}
	a.sent = c.sent
	if c.answered != nil {
		c.answered(a)
	}
}

// end ends the session. Its requests get an answer, and then its claims are lost.
func (s *session) end(err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = fmt.Errorf("%w: %w", errSession, storeError{err})
	pending := s.pending
	s.pending = nil
	for _, c := range pending {
		c.over = true
	}
	s.mu.Unlock()

	for _, c := range pending {
		if c.answered != nil {
			c.answered(answer{sent: c.sent, err: s.err})
		}
	}
	s.onEnd(s, err)
	_ = s.raw.Close() // last: others may have the locks then
}

// terminate asks the server to end the session, which it does after the requests before.
func (s *session) terminate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.front.Send(&pgproto3.Terminate{})
	_ = s.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	_ = s.front.Flush()
}

// ended returns why the session has ended, or nil.
func (s *session) ended() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// certain returns until when the server has the session, as far as silence may end it.
func (s *session) certain() time.Time { return s.confirmed.Load().Add(s.ttl) }

// waiting reports whether a request on the session waits for other sessions.
func (s *session) waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waitingLocked()
}

func (s *session) waitingLocked() bool { return len(s.pending) > 0 && s.pending[0].q.waits() }

// tend makes a request if the latest one is old, and ends the session if the server is silent.
func (s *session) tend(now time.Time) {
	s.mu.Lock()
	waits := s.waitingLocked()
	heard := *s.confirmed.Load()
	if s.unblocked.After(heard) {
		heard = s.unblocked
	}
	due := now.Sub(s.sent) >= s.ttl/4
	s.mu.Unlock()

	if waits {
		return // its end is seen by the keepalive of the connection
	}
	if now.Sub(heard) >= s.ttl {
		s.end(errSilent)
	} else if due {
		s.send(ping, 0, nil)
	}
}
