package main

import (
	"context"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// The documentation shows what the commands print. If a screen has changed, this test prints the new one.
func TestDocumentedScreens(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/command.md")
	require.NoError(t, err)
	// shown compares without what differs from run to run: ids, times, and the widths that follow.
	shown := func(t *testing.T, command, screen string) {
		t.Helper()
		text := "    $ " + command + "\n"
		for line := range strings.Lines(strings.TrimRight(screen, "\n ") + "\n") {
			text += strings.TrimRight("    "+line, " \n") + "\n"
		}
		text = regexp.MustCompile(`(?m)^ +$`).ReplaceAllString(text, "")
		require.Contains(t, maskedScreen(string(page)), maskedScreen(text), "now:\n%s", text)
	}
	harness.EachOf(t, []string{"inspect", "top"}, func(name string) string { return name }, func(t *testing.T, s *testserver.Server, name string) {
		scene(t, s)
		if name == "inspect" {
			shown(t, "redlatch inspect reports", succeeds(t, s.Addr, "inspect", "reports"))
			return
		}
		p := panes(t, s, 1)[0]
		_, err := p.tmux("resize-window", "-t", p.target, "-x", "200", "-y", "8")
		require.NoError(t, err)
		p.run("redlatch top --interval 1s")
		p.until(regexp.MustCompile(`(?m)^  invoices .* [1-9][0-9.]+ .*\n  thumbnails `))
		shown(t, "redlatch top", p.screen())
		p.keys("q")
	})
}

func maskedScreen(text string) string {
	text = regexp.MustCompile(`redis://[0-9.:]+`).ReplaceAllString(text, "URL")
	text = regexp.MustCompile(`\b[0-9a-f]{32}\b`).ReplaceAllString(text, "PERMIT")
	text = regexp.MustCompile(`(?m)^(.* invoices) .*$`).ReplaceAllString(text, "$1") // busy: now held, now free
	text = regexp.MustCompile(` names, \d held`).ReplaceAllString(text, " names")
	return masked(text)
}

// scene has processes contend for some objects until the test ends.
func scene(t *testing.T, s *testserver.Server) {
	hold := func(l lock.Locker) lock.Hold { return mustLock(t, l) }
	// Waits end before the clients are closed.
	wait := func(of func(c *redlatch.Client) lock.Locker, n int) {
		for range n {
			c := harness.Client(t, s)
			ctx, cancel := context.WithCancel(context.Background())
			waiter := harness.StartLock(t, ctx, of(c))
			t.Cleanup(func() {
				cancel()
				require.ErrorIs(t, waiter.End(), context.Canceled)
			})
			harness.Eventually(t, patience, "it waits", func() bool { return c.Stats().PubSub.Subscribed == 1 })
		}
	}
	c := harness.Client(t, s)
	hold(c.Lock("orders:42"))
	wait(func(c *redlatch.Client) lock.Locker { return c.Lock("orders:42") }, 3)

	hold(c.FairLock("reports"))
	const java = "6ba7b810-9dad-41d1-80b4-00c04fd430c8:47"
	harness.Do(t, s.Addr, "RPUSH", wire.FairQueue("reports"), java)
	deadline := time.Now().Add(4 * time.Minute).UnixMilli()
	harness.Do(t, s.Addr, "ZADD", wire.FairTimeouts("reports"), strconv.FormatInt(deadline, 10), java)
	wait(func(c *redlatch.Client) lock.Locker { return c.FairLock("reports") }, 1)

	uploads := c.PermitSemaphore("thumbnails", semaphore.Permits(4))
	for range 3 {
		_, err := uploads.Acquire(t.Context(), 1, semaphore.Forever())
		require.NoError(t, err)
	}

	invoices := harness.Client(t, s).FencedLock("invoices")
	t.Cleanup(every(20*time.Millisecond, func() {
		_ = invoices.Do(context.Background(), func(context.Context) error { return nil })
	}))
}

// every calls f after each pause, until the returned function is called, which waits for the last call.
func every(pause time.Duration, f func()) (end func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(pause):
				f()
			}
		}
	}()
	return func() { close(stop); <-stopped }
}
