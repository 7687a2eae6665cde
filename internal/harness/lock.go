package harness

import (
	"context"
	"crypto/sha1" // servers name scripts by their SHA-1
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// Lock is what locks of all kinds can do.
type Lock interface {
	lock.Locker
	Unlock(ctx context.Context) error
	ForceUnlock(ctx context.Context) (bool, error)
	IsLocked(ctx context.Context) (bool, error)
	IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error)
	HoldCount(ctx context.Context, owner lock.Owner) (int, error)
	TTL(ctx context.Context) (time.Duration, error)
}

// IsLocked reports whether anybody holds the lock.
func IsLocked(t testing.TB, l Lock) bool {
	t.Helper()
	locked, err := l.IsLocked(t.Context())
	require.NoError(t, err)
	return locked
}

// HoldCount returns how often the owner holds the lock.
func HoldCount(t testing.TB, l Lock, o lock.Owner) int {
	t.Helper()
	n, err := l.HoldCount(t.Context(), o)
	require.NoError(t, err)
	held, err := l.IsHeldBy(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, n > 0, held)
	return n
}

// HoldWorker returns a worker that takes the lock orders of a kind, says so, and
// waits to be killed. If it loses the lock it says when, and how. Its arguments are
// the address of the server, the kind, and the watchdog timeout.
func HoldWorker(of func(kind string, c *redlatch.Client) lock.Locker) func(args []string) error {
	return func(args []string) error {
		timeout, err := time.ParseDuration(args[2])
		if err != nil {
			return err
		}
		ctx := context.Background()
		c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: args[:1]}, redlatch.WithWatchdogTimeout(timeout))
		if err != nil {
			return err
		}
		h, err := of(args[1], c).Lock(ctx)
		if err != nil {
			return err
		}
		fmt.Println("holding")
		<-h.Context().Done()
		fmt.Println(time.Now().UnixNano())
		fmt.Println(context.Cause(h.Context()))
		fmt.Println(h.Unlock(ctx))
		return nil
	}
}

// call is a call in Lua of a function of a table.
var call = regexp.MustCompile(`\b(\w+)\.\w+\(`)

// Source returns what a server is sent for a file: before it comes the file of
// common functions that it calls, if there is one. Several files are sent as they are.
func Source(t testing.TB, files ...string) string {
	t.Helper()
	if len(files) > 1 {
		var all strings.Builder
		for _, file := range files {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			all.Write(source)
		}
		return all.String()
	}
	file := files[0]
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, m := range call.FindAllSubmatch(source, -1) {
		common := filepath.Join(filepath.Dir(file), string(m[1])+".lua")
		if before, err := os.ReadFile(common); err == nil && common != file {
			return string(before) + string(source)
		}
	}
	return string(source)
}

// SHA returns the name that servers have for the script of a file, or of several.
func SHA(t testing.TB, files ...string) string {
	t.Helper()
	sum := sha1.Sum([]byte(Source(t, files...)))
	return hex.EncodeToString(sum[:])
}

// Load makes a server know a script, so that a request to run it is one command, and
// returns its SHA.
func Load(t testing.TB, addr string, files ...string) string {
	t.Helper()
	Do(t, addr, "SCRIPT", "LOAD", Source(t, files...))
	return SHA(t, files...)
}

// WarmUp makes a server know the scripts of the package under test, so that a
// request is one command.
func WarmUp(t testing.TB, addr string) {
	t.Helper()
	for _, pattern := range []string{"*.lua", "../internal/locking/*.lua"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			Do(t, addr, "SCRIPT", "LOAD", Source(t, file))
		}
	}
}
