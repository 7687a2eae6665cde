package harness

import (
	"context"
	"crypto/sha1" // identifies scripts
	"encoding/hex"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

// Lock is the common interface of all kinds of locks.
type Lock interface {
	lock.Locker
	UnlockOwner(ctx context.Context) error
	ForceUnlock(ctx context.Context) (bool, error)
	IsLocked(ctx context.Context) (bool, error)
	HoldCount(ctx context.Context, owner lock.Owner) (int, error)
	TTL(ctx context.Context) (time.Duration, error)
}

// IsLocked reports whether the lock is held.
func IsLocked(t testing.TB, l Lock) bool {
	t.Helper()
	locked, err := l.IsLocked(t.Context())
	require.NoError(t, err)
	return locked
}

// HoldCount returns the hold count of an owner.
func HoldCount(t testing.TB, l Lock, o lock.Owner) int {
	t.Helper()
	n, err := l.HoldCount(t.Context(), o)
	require.NoError(t, err)
	return n
}

// call matches a Lua call of a function in a table.
var call = regexp.MustCompile(`\b(\w+)\.\w+\(`)

// Source returns the source of a script. The files of shared functions that a script
// calls, if any, are prepended to a single file; several files are only concatenated. The shared files of
// package locking precede both. A file that does not exist is looked up in the subdirectory lua.
func Source(t testing.TB, files ...string) string {
	t.Helper()
	var whole string
	for _, file := range files {
		source, err := os.ReadFile(locate(file))
		require.NoError(t, err)
		whole += string(source)
	}
	first := locate(files[0])
	if strings.HasSuffix(filepath.Dir(first), "internal/engine/lua") {
		return whole // the shared files need no others
	}
	if len(files) == 1 {
		seen := make(map[string]bool)
		for _, m := range call.FindAllStringSubmatch(whole, -1) {
			common := filepath.Join(filepath.Dir(first), m[1]+".lua")
			if before, err := os.ReadFile(common); err == nil && common != first && !seen[m[1]] {
				whole, seen[m[1]] = string(before)+whole, true
			}
		}
	}
	return engine.WithShared(whole)
}

// locate returns the path of a script, which is in its package's directory or in the
// subdirectory lua.
func locate(file string) string {
	if moved := filepath.Join(filepath.Dir(file), "lua", filepath.Base(file)); exists(moved) {
		return moved
	}
	return file
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// SHA returns the SHA-1 of a script, by which servers identify it.
func SHA(t testing.TB, files ...string) string {
	t.Helper()
	sum := sha1.Sum([]byte(Source(t, files...)))
	return hex.EncodeToString(sum[:])
}

// Load loads a script into a server, so that running it takes one command, and returns its SHA.
func Load(t testing.TB, addr string, files ...string) string {
	t.Helper()
	Do(t, addr, "SCRIPT", "LOAD", Source(t, files...))
	return SHA(t, files...)
}

// WarmUp loads the scripts of the package under test into a server, so that running one takes one
// command.
func WarmUp(t testing.TB, addr string) {
	t.Helper()
	for _, dir := range []string{".", "../internal/engine"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.lua"))
		require.NoError(t, err)
		more, err := filepath.Glob(filepath.Join(dir, "lua", "*.lua"))
		require.NoError(t, err)
		files = append(files, more...)
		require.NotEmpty(t, files)
		for _, file := range files {
			Do(t, addr, "SCRIPT", "LOAD", Source(t, file))
		}
	}
}

// Options returns options of one kind as those of a call that accepts all.
func Options[O lock.Option](opts []O) []lock.Option {
	all := make([]lock.Option, len(opts))
	for i, opt := range opts {
		all[i] = opt
	}
	return all
}

// HoldOptions returns options of a call that does not wait. It panics if others are among them.
func HoldOptions(opts []lock.Option) []lock.HoldOption {
	hold := make([]lock.HoldOption, len(opts))
	for i, opt := range opts {
		hold[i] = opt.(lock.HoldOption)
	}
	return hold
}

// Take returns l.Lock or, if once is set, l.TryLock.
func Take(l lock.Locker, once bool) func(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	if !once {
		return l.Lock
	}
	return func(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
		return l.TryLock(ctx, HoldOptions(opts)...)
	}
}
