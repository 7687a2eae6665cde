package semaphore

import (
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// sequence identifies a request, so that it takes effect once however often it is
// delivered, and can be undone. The server keeps the last sequence number of each slot
// with the reply to that request.
type sequence struct {
	slot  int
	n     uint64
	until time.Time // end of retries, well before the server drops the cached reply
}

func (s sequence) String() string { return strconv.FormatUint(s.n, 10) }

// key returns the key of the cached reply.
func (s sequence) key(name, client string) string {
	return wire.SemaphoreRequest(name, client, s.slot)
}

// slots assigns sequence numbers. A slot has one request in progress at a time, so there
// are as many slots as concurrent requests. The zero slots is ready for use.
type slots struct {
	mu    sync.Mutex
	idle  []sequence // the last sequence number of each unused slot
	count int
}

// next returns the sequence number of a new request.
func (s *slots) next() sequence {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.idle) - 1
	var seq sequence
	if last >= 0 { // the slot used last: few slots need few keys
		seq = s.idle[last]
		s.idle = s.idle[:last]
	} else {
		s.count++
		seq.slot = s.count
	}
	seq.n++
	seq.until = time.Now().Add(retryTime)
	return seq
}

// done returns a slot whose request the server has answered. A slot without an answer is
// never used again.
func (s *slots) done(seq sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, seq)
}
