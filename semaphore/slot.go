package semaphore

import (
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// sequence identifies a request, so that it takes effect once however often it is
// delivered, and can be undone. It is the state of a slot. See Retries in the package
// documentation.
type sequence struct {
	slot       int
	n          uint64
	notAfter   int64 // ms, by the server's clock
	mayHaveRun bool
}

// least returns the ms that must be left until notAfter. A first attempt must have enough
// time for retries.
func (s *sequence) least() string {
	if s.mayHaveRun {
		return "0"
	}
	return wire.Millis(retryTime - clockError)
}

// slots assigns sequence numbers. A slot has one request in progress at a time, so there
// are as many slots as concurrent requests. The zero slots is ready for use.
type slots struct {
	mu    sync.Mutex
	idle  []*sequence
	count int
	ahead int64 // by how many ms the server's clock is ahead of the local one
}

// next returns the sequence number of a new request.
func (s *slots) next() *sequence {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.idle) - 1
	if last < 0 {
		s.count++
		s.idle, last = append(s.idle, &sequence{slot: s.count}), 0
	}
	seq := s.idle[last] // the slot used last: few slots need few keys
	s.idle = s.idle[:last]
	seq.n++
	seq.mayHaveRun = false
	seq.notAfter = time.Now().UnixMilli() + s.ahead + retryTime.Milliseconds()
	return seq
}

// renew gives a request that has not run a new time, after the server has told its own.
func (s *slots) renew(seq *sequence, serverNow int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead = serverNow - time.Now().UnixMilli()
	seq.notAfter = serverNow + retryTime.Milliseconds()
}

// done returns the slot of a request that is not sent again. If it has no answer, the next
// request of the slot prevents it from running later.
func (s *slots) done(seq *sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, seq)
}
