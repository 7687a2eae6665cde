package robustness

import (
	"bytes"
	"crypto/sha1"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// TestBrokenReleaseIsDetected verifies that the check detects a release script that ignores
// the owner. The link of the workers replaces release.lua by such a script. No fault is
// needed: some leases expire in every round, and a late Unlock then takes the lock from its
// next holder.
func TestBrokenReleaseIsDetected(t *testing.T) {
	const rounds = 5
	source, err := os.ReadFile("../rlock/lua/release.lua")
	require.NoError(t, err)
	const ofOwner, ofAnybody = "redis.call('HEXISTS', KEYS[1], ARGV[1])", "redis.call('EXISTS', KEYS[1])"
	require.Equal(t, 1, strings.Count(string(source), ofOwner))
	broken := strings.Replace(string(source), ofOwner, ofAnybody, 1)
	right, instead := scriptHash(string(source)), scriptHash(broken)

	_, seed, parent := settings(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SCRIPT", "LOAD", broken)
		links := newLinks(t, s, func(request []byte) []byte { return bytes.ReplaceAll(request, right, instead) })
		for i := range uint64(rounds) {
			r := &round{seed: seed + i, server: s, links: links, dir: journals(t, parent)}
			if wrongs := r.run(t).check(r.dir, checkTimeout); len(wrongs) > 0 {
				t.Logf("detected in round %d: %s", i+1, strings.Join(wrongs, "; "))
				return
			}
		}
		require.Fail(t, "not detected", "seeds from %d", seed)
	})
}

// scriptHash is the hash by which a script is called.
func scriptHash(source string) []byte {
	sum := sha1.Sum([]byte(source))
	return []byte(hex.EncodeToString(sum[:]))
}
