package rwlock_test

import (
	"crypto/sha1" // the server names scripts by their SHA-1
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// source returns a script as it is sent.
func source(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	if slices.Contains([]string{"leave.lua", "is_locked.lua", renewWriteLua}, file) {
		return string(text)
	}
	prelude, err := os.ReadFile("holds.lua")
	require.NoError(t, err)
	return string(prelude) + string(text)
}

const renewWriteLua = "../internal/locking/renew.lua"

// warmUp makes a server know the scripts, so that a request is one command.
func warmUp(t *testing.T, s *testserver.Server) {
	t.Helper()
	files, err := filepath.Glob("*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range append(files, renewWriteLua) {
		harness.Do(t, s.Addr, "SCRIPT", "LOAD", source(t, file))
	}
}

// sha returns the name that the server has for a script.
func sha(t *testing.T, file string) string {
	t.Helper()
	sum := sha1.Sum([]byte(source(t, file)))
	return hex.EncodeToString(sum[:])
}
