package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// idler acquires at once, or gives up long after its context has ended.
type idler struct {
	block bool
	mass  []byte
}

const givingUp = 500 * time.Millisecond

func (o *idler) acquire(ctx context.Context) error {
	if !o.block {
		time.Sleep(time.Millisecond)
		return nil
	}
	<-ctx.Done()
	time.Sleep(givingUp)
	return ctx.Err()
}

func (*idler) release(context.Context) error { return nil }

func TestGivingUpIsNoPartOfTheTime(t *testing.T) {
	of := task{For: 50 * time.Millisecond}
	o := contend(of, []operation{&idler{}, &idler{block: true}})
	assert.Positive(t, o.Shares[0])
	assert.GreaterOrEqual(t, o.Elapsed, of.For)
	assert.Less(t, o.Elapsed, of.For+givingUp/2)
}

// heavy has operations of a megabyte.
type heavy struct{}

func (heavy) close() {}

func (heavy) operation(context.Context, task, string) (operation, error) {
	return &idler{mass: make([]byte, 1<<20)}, nil
}

func TestMemoryOfConnections(t *testing.T) {
	for _, whole := range []bool{false, true} {
		do, err := hold(t.Context(), task{Own: true, Whole: whole, Goroutines: 8, For: time.Millisecond, Patience: time.Minute}, heavy{})
		require.NoError(t, err)
		o, err := do()
		require.NoError(t, err)
		assert.Equal(t, whole, o.Heap > 1<<19, "%v bytes", o.Heap)
	}
}

// slow grants a lock when it is told to.
type slow struct{ grant, released chan struct{} }

func (l slow) Lock() error   { <-l.grant; return nil }
func (l slow) Unlock() error { close(l.released); return nil }

func TestAnAbandonedCallSettles(t *testing.T) {
	l := slow{make(chan struct{}), make(chan struct{})}
	p := &zookeeperPair{l: l}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.acquire(ctx), context.Canceled)
	time.AfterFunc(20*time.Millisecond, func() { close(l.grant) })
	p.settle()
	select {
	case <-l.released:
	default:
		t.Error("the late lock is still held")
	}
}
