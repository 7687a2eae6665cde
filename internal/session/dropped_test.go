package session

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A program that drops its holds does not flood the log, and no hold goes uncounted.
func TestDroppedHoldsAreLoggedOncePerSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s := bare()
		s.Logger = slog.New(slog.NewTextHandler(&log, nil))
		last := func() string {
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			return lines[len(lines)-1]
		}
		for i := range 25 { // one each 100 ms
			s.LogDropped("dropped", "number", i)
			time.Sleep(100 * time.Millisecond)
		}
		require.Equal(t, 3, strings.Count(log.String(), "\n"))
		require.Contains(t, last(), "number=20 suppressed=9")
		s.dropped.Flush(s.Logger)
		require.Contains(t, last(), "suppressed=4")
		s.dropped.Flush(s.Logger)
		require.Equal(t, 4, strings.Count(log.String(), "\n"))
		time.Sleep(time.Minute)
		s.LogDropped("dropped", "number", 25)
		require.True(t, strings.HasSuffix(last(), "number=25"), last())
		s.end()
	})
}
