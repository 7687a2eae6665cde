package main

import (
	"context"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"

	"github.com/redlatch/redlatch/ratelimit"
)

// limitPer is the interval of all rates, so short that a measurement contains many.
const limitPer = 100 * time.Millisecond

// ourPermits acquires permits of a rate limiter, which come back by themselves.
type ourPermits struct{ l *ratelimit.Limiter }

func (p ourPermits) acquire(ctx context.Context) error { return p.l.Acquire(ctx, 1) }
func (ourPermits) release(context.Context) error       { return nil }

type redisRates struct {
	conn *redis.Client
	l    *redis_rate.Limiter
}

func openRedisRate(_ context.Context, addrs []string) (service, error) {
	conn := redis.NewClient(&redis.Options{Addr: addrs[0], PoolSize: 100})
	return redisRates{conn, redis_rate.NewLimiter(conn)}, nil
}

func (s redisRates) close() { _ = s.conn.Close() }

func (s redisRates) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "rate" {
		return nil, unsupported(t)
	}
	return redisRate{s.l, name, redis_rate.Limit{Rate: t.Permits, Burst: t.Permits, Period: limitPer}}, nil
}

type redisRate struct {
	l     *redis_rate.Limiter
	name  string
	limit redis_rate.Limit
}

// acquire tries again when it is told to: the library does not wait.
func (r redisRate) acquire(ctx context.Context) error {
	for {
		res, err := r.l.Allow(ctx, r.name, r.limit)
		if err != nil || res.Allowed > 0 {
			return err
		}
		select {
		case <-time.After(res.RetryAfter):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (redisRate) release(context.Context) error { return nil }

// localRates are limiters of this process. The goroutines of a task share one.
type localRates struct{ l *rate.Limiter }

func openLocalRate(context.Context, []string) (service, error) {
	return localRates{rate.NewLimiter(0, 0)}, nil
}

func (localRates) close() {}

func (s localRates) operation(_ context.Context, t task, _ string) (operation, error) {
	if t.Kind != "rate" {
		return nil, unsupported(t)
	}
	s.l.SetLimit(rate.Limit(float64(t.Permits) / limitPer.Seconds()))
	s.l.SetBurst(t.Permits)
	return s, nil
}

func (s localRates) acquire(ctx context.Context) error { return s.l.Wait(ctx) }
func (localRates) release(context.Context) error       { return nil }
