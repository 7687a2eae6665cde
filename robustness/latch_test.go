package robustness

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/lock"
)

// The steps of a latch's history.
const (
	countDown step = "count down"
	readCount step = "count"
	await     step = "wait"
)

// latchCall is one call of a latch's method. Only calls that have, or may have, an effect or a
// result are in a history.
type latchCall struct {
	id, latch        string
	step             step
	called, returned int64
	left             int
	outcome          outcome
	err              string
}

// latchStep is an operation of a latch's history.
type latchStep struct {
	step  step
	left  int
	known bool // whether left is
}

// nextCount returns the count after a step, and whether the step is legal.
func nextCount(count int, o latchStep) (bool, int) {
	switch o.step {
	case countDown:
		count = max(0, count-1)
		return !o.known || o.left == count, count
	case wipe:
		return true, 0
	default: // a Wait returns at 0
		return o.left == count, count
	}
}

var latchModel = porcupine.Model{
	Init: func() any { return latchCount },
	Step: func(s, input, _ any) (bool, any) {
		ok, count := nextCount(s.(int), input.(latchStep))
		return ok, count
	},
	Equal: func(a, b any) bool { return a == b },
	DescribeOperation: func(input, _ any) string {
		o := input.(latchStep)
		if !o.known {
			return string(o.step)
		}
		return fmt.Sprintf("%s: %d", o.step, o.left)
	},
}

// latchOperations returns the operations on one latch.
func (h *history) latchOperations(latch string) []porcupine.Operation {
	var ops []porcupine.Operation
	add := func(o latchStep, call, ret int64) {
		ops = append(ops, porcupine.Operation{ClientId: len(ops), Input: o, Call: call, Return: ret})
	}
	for _, w := range h.wipes {
		if w.Lock == "" || w.Lock == latch {
			add(latchStep{step: wipe}, w.At, w.Until)
		}
	}
	for _, c := range h.latchCalls {
		switch {
		case c.latch != latch:
		case c.outcome == fine:
			add(latchStep{c.step, c.left, true}, c.called, c.returned)
			if c.step == countDown && h.forgotten(c) {
				add(latchStep{step: countDown}, c.called, math.MaxInt64)
			}
		case c.step == countDown && (c.returned == 0 || c.outcome == unknown):
			// It may have an effect at any time, or never: then it comes last.
			add(latchStep{step: countDown}, c.called, math.MaxInt64)
		}
	}
	return ops
}

// forgotten reports whether the server has lost all of its data during a call. If it had counted
// down before and the reply was lost, the request was sent again.
func (h *history) forgotten(c *latchCall) bool {
	return slices.ContainsFunc(h.wipes, func(w event) bool { return w.Lock == "" && c.called < w.Until && w.At < c.returned })
}

// countLatches uses the latches of the round until a time is reached.
func (p *player) countLatches(seed uint64, until int64) {
	for clock() < until {
		l := p.client.CountDownLatch(latchName(seed, p.rng.IntN(latches)))
		switch n := p.rng.IntN(100); {
		case n < 50:
			p.useLatch(l, countDown, func(ctx context.Context) (int, error) { return l.CountDown(ctx) })
		case n < 65:
			p.useLatch(l, readCount, l.Count)
		default:
			ctx, cancel := context.WithTimeout(context.Background(), p.between(0, 300*time.Millisecond))
			p.useLatch(l, await, func(context.Context) (int, error) { return 0, l.Wait(ctx) })
			cancel()
		}
		time.Sleep(p.between(0, 10*time.Millisecond))
	}
}

func (p *player) useLatch(l *countdown.Latch, s step, call func(ctx context.Context) (left int, err error)) {
	id := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	p.journal.write(event{What: counting, At: clock(), Claim: id, Lock: l.Name(), Kind: string(s)})
	left, err := call(context.Background())
	e := event{What: counted, At: clock(), Claim: id, Left: left, Outcome: fine}
	if err != nil {
		e.Err = err.Error()
		switch {
		case isWrong(err):
			e.Outcome = wrong
		case errors.Is(err, lock.ErrIndeterminate):
			e.Outcome = unknown
		default:
			e.Outcome = failed
		}
	}
	p.journal.write(e)
}
