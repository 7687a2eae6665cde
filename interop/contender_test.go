package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// result is the result of the contenders of a process.
type result struct {
	Shares  []int `json:"shares"`  // the rounds of each
	Longest int64 `json:"longest"` // wait of all of them, in ms
}

// contendWorker takes part in the contest that its argument describes and prints its result.
func contendWorker(args []string) error {
	var c contest
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return err
	}
	ctx := context.Background()
	var clients []*redlatch.Client
	for _, addrs := range c.Servers {
		client, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: addrs})
		if err != nil {
			return err
		}
		defer client.Close()
		clients = append(clients, client)
	}
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: c.Servers[0], DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	type outcome struct {
		number, had int
		longest     time.Duration
		err         error
	}
	outcomes := make(chan outcome)
	for number := range c.Contenders {
		go func() {
			ctx := ctx
			if number%2 == 1 {
				ctx = lock.WithOwner(ctx, clients[0].NewOwner())
			}
			one := contender{c, c.Objects[number%len(c.Objects)], clients, conn}
			had, longest, err := one.contend(ctx)
			outcomes <- outcome{number, had, longest, err}
		}()
	}
	r := result{Shares: make([]int, c.Contenders)}
	for range c.Contenders {
		o := <-outcomes
		if o.err != nil {
			return o.err
		}
		r.Shares[o.number], r.Longest = o.had, max(r.Longest, o.longest.Milliseconds())
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// contender is one of the contenders of a process.
type contender struct {
	contest
	object  object
	clients []*redlatch.Client
	conn    rueidis.Client
}

func (c contender) number(ctx context.Context, words ...string) (int, error) {
	n, err := c.conn.Do(ctx, c.conn.B().Arbitrary(words[0]).Keys(words[1]).Args(words[2:]...).Build()).AsInt64()
	if rueidis.IsRedisNil(err) {
		return 0, nil
	}
	return int(n), err
}

// contend runs rounds until none are left. It returns their number and the longest wait.
func (c contender) contend(ctx context.Context) (had int, longest time.Duration, err error) {
	n, err := c.number(ctx, "INCR", "ready")
	for n < c.All && err == nil {
		time.Sleep(time.Millisecond)
		n, err = c.number(ctx, "GET", "ready")
	}
	if err != nil {
		return 0, 0, err
	}
	for {
		if c.Work == "count" {
			if had == c.Rounds {
				return had, longest, nil
			}
		} else if n, err := c.number(ctx, "INCR", "tickets"); err != nil || n > c.Rounds {
			return had, longest, err
		}
		waited, err := c.round(ctx, had)
		if err != nil {
			return had, longest, err
		}
		had, longest = had+1, max(longest, waited)
	}
}

// round does the work once. It returns how long it waited.
func (c contender) round(ctx context.Context, number int) (waited time.Duration, err error) {
	switch c.Work {
	case "exclude":
		return c.locked(ctx, c.object, func(ctx context.Context) error { return c.add(ctx, c.object.names()...) })
	case "share":
		o := c.object
		if rand.IntN(4) == 0 {
			o.Kind = "write"
			return c.locked(ctx, o, func(ctx context.Context) error {
				if err := c.add(ctx, "a", "b"); err != nil {
					return err
				}
				_, err := c.number(ctx, "INCR", "writes")
				return err
			})
		}
		o.Kind = "read"
		return c.locked(ctx, o, c.look)
	case "limit":
		return c.limited(ctx)
	case "count":
		return c.count(ctx, fmt.Sprint(c.object.Name, number))
	}
	return 0, fmt.Errorf("unknown work %q", c.Work)
}

func (c contender) locked(ctx context.Context, o object, fn func(ctx context.Context) error) (waited time.Duration, err error) {
	begin := time.Now()
	err = o.lock(c.clients).Do(ctx, func(ctx context.Context) error {
		waited = time.Since(begin)
		return fn(ctx)
	})
	return waited, err
}

// add increments the numbers of those names. It fails if another contender does so meanwhile.
func (c contender) add(ctx context.Context, names ...string) error {
	for _, name := range names {
		n, err := c.number(ctx, "GET", "counter:"+name)
		if err != nil {
			return err
		}
		if err := c.conn.Do(ctx, c.conn.B().Set().Key("counter:"+name).Value(fmt.Sprint(n+1)).Build()).Error(); err != nil {
			return err
		}
	}
	return nil
}

// look fails if only one of the numbers has been written.
func (c contender) look(ctx context.Context) error {
	a, err := c.number(ctx, "GET", "counter:a")
	if err != nil {
		return err
	}
	b, err := c.number(ctx, "GET", "counter:b")
	if err == nil && a != b {
		err = fmt.Errorf("a reader saw %d and %d", a, b)
	}
	return err
}

func (c contender) limited(ctx context.Context) (waited time.Duration, err error) {
	begin := time.Now()
	var release func() error
	if c.object.Kind == "semaphore" {
		s := c.clients[0].Semaphore(c.object.Name)
		if err := s.Acquire(ctx, 1); err != nil {
			return 0, err
		}
		release = func() error { return s.Release(ctx, 1) }
	} else {
		permit, err := c.clients[0].PermitSemaphore(c.object.Name).Acquire(ctx)
		if err != nil {
			return 0, err
		}
		release = func() error { return permit.Release(ctx) }
	}
	waited = time.Since(begin)
	used, err := c.number(ctx, "INCR", "used")
	if err == nil && used > c.Limit {
		err = fmt.Errorf("%d permits are in use, of %d", used, c.Limit)
	}
	if err != nil {
		return waited, err
	}
	if _, err := c.number(ctx, "DECR", "used"); err != nil {
		return waited, err
	}
	return waited, release()
}

// count counts down and waits for all others.
func (c contender) count(ctx context.Context, name string) (waited time.Duration, err error) {
	if _, err := c.number(ctx, "INCR", "counted:"+name); err != nil {
		return 0, err
	}
	begin := time.Now()
	latch := c.clients[0].CountDownLatch(name)
	if _, err := latch.CountDown(ctx); err != nil {
		return 0, err
	}
	if err := latch.Wait(ctx); err != nil {
		return 0, err
	}
	waited = time.Since(begin)
	counted, err := c.number(ctx, "GET", "counted:"+name)
	if err == nil && counted != c.All {
		err = fmt.Errorf("the latch opened after %d of %d", counted, c.All)
	}
	return waited, err
}
