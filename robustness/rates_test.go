package robustness

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// The rate of the limiter of a round.
const (
	limitRate = 20
	limitPer  = 300 * time.Millisecond
	// limitGrace is how long the dead may keep the turn.
	limitGrace = 6 * time.Second
)

// callers are the goroutines of a worker that acquire permits of the limiter.
const callers = 6

func limiterOf(c *redlatch.Client, seed uint64) *ratelimit.Limiter {
	return c.RateLimiter(lockName(seed, "rate"), ratelimit.Rate(limitRate, limitPer))
}

// rateCall is one call of Acquire.
type rateCall struct {
	id               string
	permits          int
	wait             time.Duration
	called, returned int64
	outcome          outcome
	err              string
}

// ask is the worker that acquires permits.
func ask(w *worker, seed, number uint64, until int64) {
	var all sync.WaitGroup
	for g := range callers {
		p := player{worker: w, rng: rand.New(rand.NewPCG(seed, number*callers+uint64(g)))}
		l := limiterOf(w.client, seed)
		if g%3 == 0 {
			l = limiterOf(w.direct, seed)
		}
		all.Go(func() {
			for clock() < until {
				p.ask(l)
			}
		})
	}
	all.Wait()
}

// ask calls Acquire. It gives up early at times.
func (p *player) ask(l *ratelimit.Limiter) {
	n := 1 + p.rng.IntN(5)
	if p.chance(5) {
		n = limitRate
	}
	wait := p.between(0, 2*time.Second)
	if p.chance(20) {
		wait = 0
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if p.chance(20) {
		gives := time.AfterFunc(p.between(0, limitPer), cancel)
		defer gives.Stop()
	}

	id := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	p.journal.write(event{What: asking, At: clock(), Claim: id, Left: n, Wait: wait})
	err := l.Acquire(ctx, n, lock.Wait(wait))
	e := event{What: answered, At: clock(), Claim: id, Outcome: fine}
	if err != nil {
		e.Outcome, e.Err = outcomeOfLock(err), err.Error()
	}
	p.journal.write(e)
}

// runRates runs a round with a rate limiter and returns its history.
func (r *round) runRates(t *testing.T) *history {
	h := r.history(t, r.disturb(t, "ask", func() error { return nil }))
	c, err := connect(t.Context(), r.server.Addr)
	require.NoError(t, err)
	defer c.Close()

	l := limiterOf(c, r.seed)
	began := time.Now()
	if err := l.Acquire(t.Context(), limitRate, lock.Wait(10*limitGrace)); err != nil {
		h.atEnd = append(h.atEnd, fmt.Sprintf("the whole rate is not acquired at the end: %v", err))
	}
	if took := time.Since(began); took > limitGrace+2*limitPer+lockSlack {
		h.atEnd = append(h.atEnd, fmt.Sprintf("the whole rate is acquired %v after the end", took))
	}
	free, err := l.Available(t.Context())
	require.NoError(t, err)
	if free != 0 && time.Since(began) < limitPer {
		h.atEnd = append(h.atEnd, fmt.Sprintf("%d permits are free beside those of the whole rate", free))
	}
	_, err = l.Delete(t.Context())
	require.NoError(t, err)
	return h
}

// rateWrongs returns the windows with more permits than the rate, and what is wrong with single calls. A call has
// acquired its permits at a time between its beginning and its end, by the server's clock, which has whole
// milliseconds. So those that lie within less than an interval have no more permits than the rate, if the server has lost
// nothing meanwhile.
func (h *history) rateWrongs() (wrongs []string) {
	const window = int64(limitPer - 2*time.Millisecond)
	for i, first := range h.rateCalls {
		switch {
		case first.outcome == wrong:
			wrongs = append(wrongs, fmt.Sprintf("%s: unexpected error: %s", first.id, first.err))
		case first.returned > 0 && time.Duration(first.returned-first.called) > first.wait+lockSlack:
			wrongs = append(wrongs, fmt.Sprintf(
				"%s: Acquire with a Wait of %v took %v", first.id, first.wait, time.Duration(first.returned-first.called)))
		}

		until := first.called + window
		for _, w := range h.wipes {
			if w.Until > first.called {
				until = min(until, w.At)
			}
		}
		sum := 0
		for _, c := range h.rateCalls[i:] {
			if c.outcome == fine && c.returned <= until {
				sum += c.permits
			}
		}
		if sum > limitRate {
			wrongs = append(wrongs, fmt.Sprintf("%s: %d permits in %v from its beginning on", first.id, sum, time.Duration(window)))
		}
	}
	return wrongs
}

// The permits of a limiter are within its rate, whatever happens to processes, connections and the server.
func TestRates(t *testing.T) {
	histories(t, workers, (*round).runRates, totals.addRates, ratesWanted)
}

// addRates counts the events of a round with a limiter.
func (s totals) addRates(h *history) {
	s["fault"] += h.faults
	s["wipe"] += len(h.wipes)
	for _, c := range h.rateCalls {
		if c.returned == 0 {
			s["call cut short by a kill"]++
			continue
		}
		s[string(c.outcome)]++
		if c.outcome == fine && c.permits == limitRate {
			s["whole rate"]++
		}
		if c.outcome == fine && time.Duration(c.returned-c.called) > limitPer/2 {
			s["wait"]++
		}
	}
}

// ratesWanted returns the events that a run of that length contains.
func ratesWanted(runFor time.Duration) map[string]int {
	wanted := map[string]int{string(fine): 1}
	if runFor >= smoke {
		maps.Copy(wanted, map[string]int{"fault": 1, string(fine): 100, string(refused): 1, "wait": 10})
	}
	if runFor >= longRun {
		maps.Copy(wanted, map[string]int{"wipe": 1, "whole rate": 1, "call cut short by a kill": 1, string(unknown): 1})
	}
	return wanted
}

// The model finds a permit too many, and only that.
func TestRateModel(t *testing.T) {
	ms := func(n int64) int64 { return n * int64(time.Millisecond) }
	calls := []*rateCall{
		{id: "a", permits: limitRate - 1, called: ms(10), returned: ms(20), outcome: fine},
		{id: "refused", permits: 5, called: ms(15), returned: ms(30), outcome: refused},
		{id: "killed", permits: 5, called: ms(15)},
		{id: "b", permits: 1, called: ms(200), returned: ms(305), outcome: fine},
		{id: "c", permits: 1, called: ms(200), returned: ms(312), outcome: fine}, // it may be in the next window
	}
	h := &history{rateCalls: calls}
	require.Empty(t, h.rateWrongs())
	calls[4].returned = ms(306)
	require.Len(t, h.rateWrongs(), 1)
	h.wipes = []event{{At: ms(50), Until: ms(60)}}
	require.Empty(t, h.rateWrongs())
	h.wipes[0] = event{At: ms(1), Until: ms(9)}
	require.Len(t, h.rateWrongs(), 1)
	calls[1].outcome = wrong
	require.Len(t, h.rateWrongs(), 2)
	calls[3].returned = ms(200) + int64(lockSlack) + 1
	require.Len(t, h.rateWrongs(), 2)
}
