package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// signals is the floor of a wake-up. The first process publishes, and the second runs one
// script on each message: a waiter must receive a message and then acquire the lock. Messages
// allow no faster way.
func signals(_ context.Context, t task, s service) (job, error) {
	f, ok := s.(*floor)
	if !ok {
		return nil, fmt.Errorf("%s does not support bare signals", t.Peer)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if t.Process == 0 {
		return func() (*outcome, error) { defer cancel(); return publish(ctx, t, f.conn) }, nil
	}
	op := &floorPair{floor: f, keys: []string{t.Name}, channel: "unused"}
	out, heard := &outcome{}, make(chan error, 1)
	ready := make(chan struct{})
	subscription := sync.OnceFunc(func() { close(ready) })
	go func() {
		subscribed := rueidis.WithOnSubscriptionHook(ctx, func(rueidis.PubSubSubscription) { subscription() })
		heard <- f.conn.Receive(subscribed, f.conn.B().Subscribe().Channel(t.Name).Build(), func(m rueidis.PubSubMessage) {
			sent, err := strconv.ParseInt(m.Message, 10, 64)
			if err == nil {
				err = op.acquire(ctx)
			}
			took := time.Duration(monotonic() - sent)
			if err == nil {
				err = op.release(ctx)
			}
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				out.fail(err)
				return
			}
			out.Wake.add(took)
		})
	}()
	select {
	case <-ready:
	case err := <-heard:
		cancel()
		return nil, errors.Join(errors.New("not subscribed"), err)
	}
	return func() (*outcome, error) {
		time.Sleep(t.For)
		cancel()
		<-heard
		out.Elapsed, out.Shares = t.For, []int{int(out.Wake.n)}
		return out, nil
	}, nil
}

// publish publishes the time at the rate at which a lock that is held for t.Hold would change
// hands.
func publish(ctx context.Context, t task, conn rueidis.Client) (*outcome, error) {
	out := &outcome{Elapsed: t.For}
	for over := time.Now().Add(t.For); time.Now().Before(over); time.Sleep(t.Hold) {
		now := strconv.FormatInt(monotonic(), 10)
		if err := conn.Do(ctx, conn.B().Publish().Channel(t.Name).Message(now).Build()).Error(); err != nil {
			return nil, err
		}
	}
	return out, nil
}
