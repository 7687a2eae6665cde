package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var workers = map[string]func(args []string) error{
	"wait to write": waitWorker,
	"contend":       contendWorker,
}

// waitWorker waits for the write lock for ever, and prints when it has begun to.
func waitWorker(args []string) error {
	ctx := context.Background()
	c, err := redlatch.Open(ctx, "redis://"+args[0])
	if err != nil {
		return err
	}
	go func() {
		for c.PubSub().Subscribed == 0 {
			time.Sleep(time.Millisecond)
		}
		fmt.Println("waiting")
	}()
	_, err = c.RWLock("orders").Write().Lock(ctx)
	return err
}

const goroutinesPerProcess = 8

// The keys of contenders.
const (
	contended = "contended"
	entrants  = "contended:entrants" // holders, with the time until which their lease certainly runs
	tally     = "contended:tally"    // number of entries of each side
	wrongs    = "contended:wrongs"   // violations
)

// A holder runs inspect when it enters and before it leaves.
// KEYS     the four above
// ARGV[1]  enter or leave
// ARGV[2]  read or write
// ARGV[3]  id of its claim
// ARGV[4]  number of the hold
// ARGV[5]  until when the lease certainly runs, in ms of the wall clock
// ARGV[6]  id of the first claim of the same owner
// ARGV[7]  id of the read claim of the same owner, or empty. If its attempt to read failed,
// its client: the claim of a cancelled attempt stays until it is cleaned up.
// Reply: 1; 0 if the lease may be over.
var inspect = wire.NewScript(`
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local side, claim, owner = ARGV[2], ARGV[3], ARGV[6]
local me = side .. ' ' .. claim .. ' ' .. owner .. ' ' .. ARGV[4]
if tonumber(ARGV[5]) <= now then
	redis.call('ZREM', KEYS[2], me)
	return 0
end

local fields, list = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #list, 2 do
	fields[list[i]] = list[i + 1]
end
local function wrong(what)
	local inside = table.concat(redis.call('ZRANGE', KEYS[2], 0, -1), ', ')
	redis.call('RPUSH', KEYS[4], me .. ' at ' .. ARGV[1] .. ': ' .. what .. '; lock: ' .. table.concat(list, ' ') .. '; inside: ' .. inside)
end
local function inHash(side, claim, owner)
	local field = side == 'write' and claim .. ':write' or claim
	local mode = side == 'write' and 'write' or fields[owner .. ':write'] and 'write' or 'read'
	return fields[field] and fields.mode == mode
end
if not inHash(side, claim, owner) then
	wrong('not in the hash')
end
if side == 'write' then
	local client = string.match(claim, '^[^:]+')
	for field in pairs(fields) do
		local own = field == ARGV[7] or ARGV[7] == client and string.match(field, '^([^:]+):%d+$') == client
		if field ~= 'mode' and not own and field ~= claim .. ':write' then
			wrong('another owner is in the hash of a writer')
		end
	end
end
for _, other in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
	local s, c, o = string.match(other, '^(%S+) (%S+) (%S+) ')
	if o ~= owner and (s == 'write' or side == 'write') then
		wrong('together with ' .. other)
	end
	if not inHash(s, c, o) then
		wrong('holds, and is not in the hash: ' .. other)
	end
end

if ARGV[1] == 'enter' then
	redis.call('ZADD', KEYS[2], ARGV[5], me)
	redis.call('HINCRBY', KEYS[3], side, 1)
else
	redis.call('ZREM', KEYS[2], me)
end
return 1`)

// contender is a goroutine that acquires both sides of the lock in every possible way.
type contender struct {
	c     *redlatch.Client
	conn  rueidis.Client
	rng   *rand.Rand
	holds int
	first lock.Hold // of its current owner
	read  string    // ARGV[7] of inspect
}

func (k *contender) inspect(event, side, id string, h lock.Hold) error {
	// The server rounds its clock to a millisecond.
	until := time.Now().Add(h.Remaining()).UnixMilli() - 2
	return inspect.Exec(context.Background(), k.conn, []string{contended, entrants, tally, wrongs},
		[]string{event, side, h.Owner().String(), id, strconv.FormatInt(until, 10), k.first.Owner().String(), k.read}).Error()
}

// inside runs do and inspects the lock before and after, then ends the hold.
func (k *contender) inside(side string, h lock.Hold, do func() error) error {
	k.holds++
	id := strconv.Itoa(k.holds)
	err := k.inspect("enter", side, id, h)
	if err == nil {
		err = do()
	}
	return errors.Join(err, k.inspect("leave", side, id, h), k.unlock(h))
}

func (k *contender) unlock(h lock.Hold) error {
	if err := h.Unlock(context.Background()); err != nil && !errors.Is(err, lock.ErrLost) {
		return err
	}
	return nil
}

func (k *contender) upTo(d time.Duration) time.Duration { return time.Duration(k.rng.Int64N(int64(d))) }

// pause spends time while holding the lock.
func (k *contender) pause() error {
	switch n := k.rng.IntN(100); {
	case n == 0:
		time.Sleep(k.upTo(400 * time.Millisecond)) // more than most leases
	case n < 50:
		time.Sleep(k.upTo(5 * time.Millisecond))
	}
	return nil
}

// take acquires one side and reports whether it succeeded.
func (k *contender) take(ctx context.Context, side string) (lock.Hold, bool, error) {
	l := reading(k.c, contended)
	if side == "write" {
		l = writing(k.c, contended)
	}
	var opts []lock.Option
	if k.rng.IntN(3) == 0 {
		opts = append(opts, lock.Lease(30*time.Millisecond+k.upTo(300*time.Millisecond)))
	}
	const patience = 20 * time.Second // far more than needed
	began := time.Now()
	var h lock.Hold
	var err error
	switch k.rng.IntN(5) {
	case 0:
		h, err = l.TryLock(ctx, opts...)
	case 1:
		h, err = l.Lock(ctx, append(opts, lock.Wait(k.upTo(200*time.Millisecond)))...)
	case 2:
		ctx, cancel := context.WithTimeout(ctx, k.upTo(50*time.Millisecond))
		h, err = l.Lock(ctx, opts...)
		cancel()
	default:
		h, err = l.Lock(ctx, append(opts, lock.Wait(patience))...)
	}
	switch {
	case err == nil:
		return h, true, nil
	case time.Since(began) >= patience:
		return nil, false, fmt.Errorf("a waiter hangs: %w", err)
	case errors.Is(err, lock.ErrNotAcquired), errors.Is(err, lock.ErrIndeterminate):
		return nil, false, nil
	case errors.Is(err, lock.ErrUnavailable) && errors.Is(err, context.DeadlineExceeded):
		return nil, false, nil // a busy server has not answered others for a while
	default:
		return nil, false, err
	}
}

func (k *contender) round() error {
	ctx := context.Background()
	side := "read"
	if k.rng.IntN(3) == 0 {
		side = "write"
	}
	if k.rng.IntN(3) > 0 {
		h, ok, err := k.take(ctx, side)
		if !ok {
			return err
		}
		k.first, k.read = h, ""
		return k.inside(side, h, k.pause)
	}
	// A named owner acquires it again, or downgrades.
	ctx = lock.WithOwner(ctx, k.c.NewOwner())
	h, ok, err := k.take(ctx, side)
	if !ok {
		return err
	}
	again := side
	if k.rng.IntN(2) == 0 {
		again = "read"
	}
	k.first, k.read = h, ""
	var after lock.Hold
	err = k.inside(side, h, func() error {
		var err error
		after, _, err = k.take(ctx, again)
		switch {
		case again != "read":
		case after != nil:
			k.read = after.Owner().String()
		default:
			k.read, _, _ = strings.Cut(h.Owner().String(), ":")
		}
		return errors.Join(err, k.pause())
	})
	if after == nil {
		return err
	}
	return errors.Join(err, k.inside(again, after, k.pause))
}

// contendWorker contends with others until the key stop exists.
func contendWorker(args []string) error {
	addr := args[0]
	seed, err := strconv.ParseUint(args[1], 10, 64)
	if err != nil {
		return err
	}
	timeout, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, redlatch.WithWatchdogTimeout(timeout))
	if err != nil {
		return err
	}
	defer c.Close()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	var wg sync.WaitGroup
	for g := range goroutinesPerProcess {
		wg.Go(func() {
			k := &contender{c: c, conn: conn, rng: rand.New(rand.NewPCG(seed, uint64(g)))}
			for {
				if n, err := conn.Do(ctx, conn.B().Exists().Key("stop").Build()).AsInt64(); err == nil && n == 1 {
					return
				}
				if err := k.round(); err != nil {
					_ = conn.Do(ctx, conn.B().Rpush().Key(wrongs).Element(err.Error()).Build()).Error()
				}
			}
		})
	}
	wg.Wait()
	fmt.Println("done")
	return nil
}

// Processes contend for both sides, and are killed and stopped all the time. Each holder checks
// the lock against the entries of the other holders.
func TestProcessesExcludeEachOther(t *testing.T) {
	const (
		processes = 4
		timeout   = 600 * time.Millisecond // of the watchdog
		// longest bounds the time without an entry: a dead writer's registration, a lease.
		longest = 8 * time.Second
	)
	lasts := time.Duration(harness.Size(4, 15)) * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		seed := rand.Uint64N(1_000_000)
		t.Log("seed", seed)
		rng := rand.New(rand.NewPCG(seed, 0))
		spawned := uint64(0)
		spawn := func() *harness.Process {
			spawned++
			return harness.Spawn(t, "contend", s.Addr, strconv.FormatUint(seed+spawned, 10), timeout.String())
		}
		entered := func() (n int) {
			counts, err := testserver.Query(s.Addr, "HVALS", tally)
			require.NoError(t, err)
			for _, count := range counts {
				c, err := strconv.Atoi(count)
				require.NoError(t, err)
				n += c
			}
			return n
		}
		right := func() {
			t.Helper()
			what, err := testserver.Query(s.Addr, "LRANGE", wrongs, "0", "9")
			require.NoError(t, err)
			require.Empty(t, what)
		}
		var procs []*harness.Process
		for range processes {
			procs = append(procs, spawn())
		}
		harness.Eventually(t, 30*time.Second, "they have begun", func() bool { return entered() > 0 })
		kills, stops := 0, 0
		last, progress, idle := 0, time.Now(), time.Duration(0)
		var stopped *harness.Process
		for end := time.Now().Add(lasts); time.Now().Before(end); {
			<-time.After(time.Duration(rng.Int64N(int64(600 * time.Millisecond))))
			if n := entered(); n > last {
				last, progress = n, time.Now()
			}
			idle = max(idle, time.Since(progress))
			require.Less(t, idle, longest, "no entry")
			right()
			if stopped != nil {
				stopped.Signal(syscall.SIGCONT)
				stopped = nil
			}
			switch i := rng.IntN(processes); rng.IntN(3) {
			case 0:
				kills++
				procs[i].Kill()
				procs[i] = spawn()
			case 1:
				stops++
				stopped = procs[i]
				stopped.Signal(syscall.SIGSTOP)
			}
		}
		if stopped != nil {
			stopped.Signal(syscall.SIGCONT)
		}
		harness.Do(t, s.Addr, "SET", "stop", "1")
		for _, p := range procs {
			require.Equal(t, "done", p.Line(30*time.Second))
			p.Ended(10 * time.Second)
		}
		right()
		counts, err := testserver.Query(s.Addr, "HMGET", tally, "read", "write")
		require.NoError(t, err)
		t.Logf("%d killed, %d stopped, %v read and write entries, at most %v without an entry", kills, stops, counts, idle)
		require.Greater(t, entered(), harness.Size(50, 200))

		harness.Do(t, s.Addr, "DEL", entrants, tally, "stop")
		c := harness.Client(t, s)
		for _, side := range sides {
			h, err := side.of(c, contended).Lock(t.Context(), lock.Wait(longest))
			require.NoError(t, err)
			unlock(t, h)
		}
		harness.NothingStays(t, s.Addr)
	})
}
