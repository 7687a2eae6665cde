package robustness

import (
	"bytes"
	"crypto/sha1"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// brokenScripts are changes of a script that break a promise, and the fault that it takes to see
// that, if any. The files of a script are separated by spaces.
var brokenScripts = []struct {
	name          string
	folder, files string
	right, wrong  string
	fault         string
}{
	{"a release ends the hold of anybody", "rlock", "release",
		"redis.call('HEXISTS', KEYS[1], ARGV[1])", "redis.call('EXISTS', KEYS[1])", ""},
	{"a lock is taken from its holder", "rlock", "acquire",
		"if fields == 0 then", "if fields < 2 then", ""},
	{"a fenced lock repeats its tokens", "rlock", "acquire",
		"redis.call('INCR', KEYS[2])", "redis.call('INCRBY', KEYS[2], redis.call('TIME')[2] % 2)", ""},
	{"a multi-lock skips a member that is taken", "rlock", "acquire_each",
		"if redis.call('HEXISTS', key, ARGV[2 + i]) == 0 then", "if false then", ""},
	{"a fair lock ignores its queue", "fairlock", "positions acquire",
		"(not next or next == claim(i))", "true", ""},
	{"two terms have the same token", "election", "begin",
		"redis.call('HINCRBY', KEYS[2], 'token', 1)", "redis.call('HINCRBY', KEYS[2], 'token', redis.call('TIME')[2] % 2)", ""},
	{"readers enter beside a writer", "rwlock", "holds acquire_read",
		"local open = free or mode == 'read'", "local open = true", ""},
	{"a writer enters beside readers", "rwlock", "holds acquire_write",
		"if fields > 0 then", "if mode == 'write' then", ""},
	{"the first reader to leave frees the lock", "rwlock", "holds release_read",
		"if others == 0 or", "if others >= 0 or", ""},
	{"a semaphore has a permit too many", "semaphore", "usual acquire_usual pool acquire",
		"- ARGV[12] >= 0", "- ARGV[12] >= -1", ""},
	{"a permit that has expired is released", "semaphore", "usual permit_release_usual pool permits permit_release",
		"if permits.held(taken, ARGV[i], now) then", "if true then", ""},
	{"a release without a reply is repeated", "semaphore", "usual release_usual pool release",
		"local entry = redis.call('HGET', requests, ARGV[2])", "local entry = nil", "lose replies to all"},
	{"a latch counts down twice", "countdown", "count count_down",
		"latch.reply(redis.call('DECRBY', KEYS[1], ARGV[5]))", "latch.reply(redis.call('DECRBY', KEYS[1], ARGV[5] * 2))", ""},
	{"a count without a reply is repeated", "countdown", "count count_down",
		"redis.pcall('SET', KEYS[3], n, 'PX', ARGV[1])", "", "lose replies to all"},
	{"a rate limiter gives permits too early", "ratelimit", "limiter acquire",
		"if due <= now then", "if due <= now + 100 then", ""},
}

// TestBrokenScriptsAreDetected verifies that the checks detect each of these scripts. The link of
// the workers replaces the right script by it.
func TestBrokenScriptsAreDetected(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for i, b := range brokenScripts {
			var files []string
			for file := range strings.FieldsSeq(b.files) {
				files = append(files, "../"+b.folder+"/"+file+".lua")
			}
			source := harness.Source(t, files...)
			require.Equal(t, 1, strings.Count(source, b.right), b.name)
			if testing.Short() && i%6 != 0 {
				continue // all of them take a minute
			}
			t.Run(b.name, func(t *testing.T) {
				broken := strings.Replace(source, b.right, b.wrong, 1)
				right, instead := scriptHash(source), scriptHash(broken)
				links := newLinks(t, s, workers, func(request []byte) []byte { return bytes.ReplaceAll(request, right, instead) })
				detected(t, func(r *round) *history {
					harness.Do(t, s.Addr, "SCRIPT", "LOAD", broken)
					r.server, r.links, r.only = s, links, b.fault
					if b.fault != "" {
						r.faults = mostFaults
					}
					if b.folder == "ratelimit" {
						return r.runRates(t)
					}
					return r.run(t)
				})
			})
		}
	})
}

// detected requires that one of several rounds violates a promise.
func detected(t *testing.T, run func(*round) *history) {
	const rounds = 40
	_, seed, parent := settings(t)
	if os.Getenv("REDLATCH_ROBUSTNESS_SEED") == "" {
		seed = 1
	}
	for i := range uint64(rounds) {
		r := &round{seed: seed + i, dir: journals(t, parent), time: 1500 * time.Millisecond}
		if wrongs := run(r).check(r.dir, checkTimeout); len(wrongs) > 0 {
			t.Logf("detected with seed %d: %s", r.seed, strings.Join(wrongs, "; "))
			return
		}
	}
	require.Fail(t, "not detected", "seeds from %d", seed)
}

// scriptHash is the hash by which a script is called.
func scriptHash(source string) []byte {
	sum := sha1.Sum([]byte(source))
	return []byte(hex.EncodeToString(sum[:]))
}
