package harness

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
)

// Receive returns the next value of a channel. The test fails if there is none within d.
func Receive[T any](t testing.TB, d time.Duration, what string, values <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-values:
	case <-time.After(d):
		require.FailNow(t, "not within "+d.String()+": "+what)
	}
	return value
}

// Messages returns the messages published on a channel of a server from now on.
func Messages(t testing.TB, addr, channel string) <-chan string {
	t.Helper()
	conn := Conn(t, addr)
	messages, confirmed, ended := make(chan string, 1000), make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	var once sync.Once
	ctx = rueidis.WithOnSubscriptionHook(ctx, func(rueidis.PubSubSubscription) { once.Do(func() { close(confirmed) }) })
	go func() {
		defer close(ended)
		_ = conn.Receive(ctx, conn.B().Subscribe().Channel(channel).Build(), func(m rueidis.PubSubMessage) { messages <- m.Message })
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	Receive(t, 10*time.Second, "the subscription", confirmed)
	return messages
}
