package semaphore

import (
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// number identifies a request, so that it takes effect once however often it is
// delivered, and can be called off. The server keeps the last number of a lane,
// where they grow, and what became of that request.
type number struct {
	lane  int
	n     uint64
	until time.Time // when the server may soon have forgotten it
}

func (n number) String() string { return strconv.FormatUint(n.n, 10) }

func (n number) ticket(key, client string) string {
	return wire.SemaphoreRequest(key, client, n.lane)
}

// numbers hands out numbers. A lane has one request under way at a time: there are
// as many as there are requests at once. The zero numbers is ready for use.
type numbers struct {
	mu    sync.Mutex
	idle  []number // the last number of each lane that is not in use
	lanes int
}

// next returns the number for a new request.
func (s *numbers) next() number {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.idle) - 1
	var n number
	if last >= 0 { // the lane used last: the fewer are in use, the fewer tickets
		n = s.idle[last]
		s.idle = s.idle[:last]
	} else {
		s.lanes++
		n.lane = s.lanes
	}
	n.n++
	n.until = time.Now().Add(settleTime)
	return n
}

// answered is called when the server has answered a request, which then is not
// under way any more. A lane of which that is never known is not used again.
func (s *numbers) answered(n number) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, n)
}
