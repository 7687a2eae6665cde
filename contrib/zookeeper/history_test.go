package zklock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// period is a time during which a holder could be sure of its lock.
type period struct {
	token      int64
	begin, end time.Time
}

// resource checks tokens.
type resource struct {
	mu    sync.Mutex
	last  int64
	stale int // writes that were refused
	order []int64
}

func (r *resource) write(token int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if token < r.last {
		r.stale++
		return
	}
	r.last = token
	r.order = append(r.order, token)
}

// Holds never overlap, whatever happens to servers and connections, and their tokens grow.
func TestHistory(t *testing.T) {
	t.Parallel()
	servers := ensemble(t, 3)
	length := 10 * time.Second
	if !testing.Short() {
		length = time.Minute
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	name := unused(t)

	var (
		mu      sync.Mutex
		periods []period
		failed  int
		res     resource
		done    sync.WaitGroup
		latest  atomic.Int64 // client that has acquired the lock
	)
	ctx, stop := context.WithTimeout(t.Context(), length)
	defer stop()
	links := make([][]*proxy, 4) // of each client
	for i := range links {
		var behind []string
		for _, s := range servers {
			links[i] = append(links[i], newProxy(t, s.addr))
			behind = append(behind, links[i][len(links[i])-1].addr())
		}
		p := open(t, behind)
		for range 2 {
			done.Go(func() {
				for ctx.Err() == nil {
					h, err := p.Lock(name).Lock(ctx, lock.Wait(time.Second), lock.Parent(context.Background()))
					if err != nil {
						mu.Lock()
						failed++
						mu.Unlock()
						for _, never := range []error{lock.ErrInvalid, lock.ErrLost, lock.ErrClosed, lock.ErrNotHeld} {
							assert.NotErrorIs(t, err, never)
						}
						continue
					}
					begin := time.Now()
					latest.Store(int64(i))
					res.write(h.Token())
					time.Sleep(rand.N(3 * time.Millisecond))
					if rand.N(50) == 0 { // longer than its session if that is cut off
						select {
						case <-h.Context().Done():
							time.Sleep(timeout) // it does not notice
						case <-time.After(2 * timeout):
						}
					}
					end := time.Now()
					certain := h.Remaining() > 0
					res.write(h.Token())
					if certain {
						mu.Lock()
						periods = append(periods, period{h.Token(), begin, end})
						mu.Unlock()
					}
					err = h.Unlock(context.Background())
					if err != nil && !errors.Is(err, lock.ErrLost) && !errors.Is(err, lock.ErrIndeterminate) {
						assert.NoError(t, err)
					}
				}
			})
		}
	}

	// One fault at a time, with a pause, so that a majority of the servers goes on.
	for ctx.Err() == nil {
		i := random.IntN(len(servers))
		pause := time.Duration(random.Int64N(int64(2 * timeout)))
		switch random.IntN(6) {
		case 0:
			servers[i].stop()
			sleep(ctx, pause)
			require.NoError(t, servers[i].start())
			require.NoError(t, servers[i].await())
		case 1:
			servers[i].signal(t, syscall.SIGSTOP)
			sleep(ctx, pause)
			servers[i].signal(t, syscall.SIGCONT)
		case 2:
			for _, l := range links[latest.Load()] {
				l.cut()
			}
		default:
			of := links[latest.Load()]
			for _, l := range of {
				l.stall()
			}
			sleep(ctx, timeout+pause/2)
			for _, l := range of {
				l.resume()
			}
		}
		sleep(ctx, time.Second)
	}
	done.Wait()

	t.Logf("%d holds, %d failed calls, %d stale writes refused", len(periods), failed, res.stale)
	require.NotEmpty(t, periods)
	slices.SortFunc(periods, func(a, b period) int { return a.begin.Compare(b.begin) })
	for i, p := range periods[1:] {
		before := periods[i]
		if p.begin.Before(before.end) || p.token <= before.token {
			t.Errorf("token %d follows %d, and begins %v after its end", p.token, before.token, p.begin.Sub(before.end))
		}
	}
	for i := range res.order[1:] {
		require.LessOrEqual(t, res.order[i], res.order[i+1])
	}

	last := open(t, addrs(servers))
	require.NoError(t, acquire(t, last.Lock(name)).Unlock(t.Context()))
	eventually(t, "nothing is left", func() bool { return len(nodes(t, last.conn, name)) == 0 })
}

// sleep sleeps for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
