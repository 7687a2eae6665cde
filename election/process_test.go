package election_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

var workers = map[string]func(args []string) error{"campaign": campaignWorker}

// processTimeout is the watchdog timeout of workers: their terms are over soon after they die.
const processTimeout = time.Second

// campaignWorker has many candidates lead again and again until SIGTERM. The journal gets a
// line when a term begins, with the time after that, and one when it ends, with the last time at which
// the leader was certain to lead.
func campaignWorker(args []string) error {
	addr, path := args[0], args[1]
	candidates, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	journal, err := os.Create(path)
	if err != nil {
		return err
	}
	defer journal.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	c, err := redlatch.Open(context.Background(), "redis://"+addr, redlatch.WithWatchdogTimeout(processTimeout))
	if err != nil {
		return err
	}
	defer c.Close()
	var wg sync.WaitGroup
	errs := make(chan error, candidates)
	for i := range candidates {
		wg.Go(func() {
			for ctx.Err() == nil {
				term, err := c.Election(name).Campaign(ctx, fmt.Sprint(os.Getpid(), "#", i))
				if err == nil {
					err = lead(journal, term)
				}
				if isWrong(err) && ctx.Err() == nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// lead leads for some milliseconds, unless the term ended before, because this process was stopped.
func lead(journal *os.File, term *election.Term) error {
	begun := time.Now()
	if term.Remaining() == 0 {
		return term.Resign(context.Background())
	}
	fmt.Fprintln(journal, "begin", term.Token(), begun.UnixNano())
	certain := begun
	for end := begun.Add(rand.N(10 * time.Millisecond)); ; {
		now := time.Now()
		if term.Remaining() == 0 {
			break
		}
		certain = now
		if now.After(end) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	fmt.Fprintln(journal, "end", term.Token(), certain.UnixNano())
	return term.Resign(context.Background())
}

// isWrong reports whether no fault of this test explains an error.
func isWrong(err error) bool {
	for _, expected := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrLost} {
		if errors.Is(err, expected) {
			return false
		}
	}
	return err != nil
}

// journaled is a term in a journal; end is 0 if the process was killed.
type journaled struct{ token, begin, end int64 }

func readJournal(t *testing.T, path string) []journaled {
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	terms := map[int64]journaled{}
	for s := bufio.NewScanner(f); s.Scan(); {
		var what string
		var token, at int64
		_, err := fmt.Sscan(s.Text(), &what, &token, &at)
		require.NoError(t, err)
		if what == "begin" {
			require.NotContains(t, terms, token)
			terms[token] = journaled{token: token, begin: at}
		} else {
			terms[token] = journaled{token, terms[token].begin, at}
		}
	}
	var all []journaled
	for _, term := range terms {
		all = append(all, term)
	}
	return all
}

// 64 candidates in four processes lead one after the other, with growing tokens, although one process
// is killed, one stopped and one cut off.
func TestTermsOfProcesses(t *testing.T) {
	const processes, candidates = 4, 16
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		dir := t.TempDir()
		g := harness.NewGate(t, s)
		watcher, deaf := harness.GatedClient(t, s)
		deaf.Mute()
		observer := observe(t.Context(), watcher.Election(name))
		var all []*harness.Process
		for i := range processes {
			addr := s.Addr
			if i == 2 {
				addr = g.Addr
			}
			all = append(all, harness.Spawn(t, "campaign", addr, filepath.Join(dir, fmt.Sprint(i)), fmt.Sprint(candidates)))
		}
		conn := harness.Conn(t, s.Addr)
		token := func() int64 {
			n, err := conn.Do(t.Context(), conn.B().Hget().Key(wire.ElectionTerm(name)).Field("token").Build()).AsInt64()
			if !rueidis.IsRedisNil(err) {
				require.NoError(t, err)
			}
			return n
		}
		terms := harness.Size(processes*candidates, 1000)
		goesOn := func(what string) {
			t.Helper()
			first := token()
			harness.Eventually(t, time.Minute, "more terms after a process was "+what, func() bool {
				return token() >= first+int64(terms)
			})
		}
		harness.Eventually(t, time.Minute, "all processes have led", func() bool {
			for i := range processes {
				if info, err := os.Stat(filepath.Join(dir, fmt.Sprint(i))); err != nil || info.Size() == 0 {
					return false
				}
			}
			return true
		})
		all[0].Kill()
		goesOn("killed")
		all[1].Signal(syscall.SIGSTOP)
		goesOn("stopped")
		time.Sleep(processTimeout / 2) // it may have been stopped as the leader, or as a candidate
		all[1].Signal(syscall.SIGCONT)
		g.Stall()
		goesOn("cut off")
		require.NoError(t, g.Open())
		goesOn("reconnected")
		for _, p := range all[1:] {
			p.Signal(syscall.SIGTERM)
		}
		for _, p := range all[1:] {
			p.Ended(30 * time.Second)
		}

		var history []journaled
		for i := range processes {
			led := readJournal(t, filepath.Join(dir, fmt.Sprint(i)))
			require.NotEmpty(t, led, "process %d never led", i)
			history = append(history, led...)
		}
		slices.SortFunc(history, func(a, b journaled) int { return cmp.Compare(a.begin, b.begin) })
		for i, term := range history[1:] {
			before := history[i]
			require.Greater(t, term.token, before.token)
			require.GreaterOrEqual(t, term.begin, before.end, "terms %d and %d overlap", before.token, term.token)
		}
		require.GreaterOrEqual(t, len(history), terms)

		last := campaign(t, harness.Client(t, s), "last")
		for seen := int64(0); seen != last.Token(); {
			next := harness.Receive(t, safetyPoll+soon, "the last leader", observer)
			require.NoError(t, next.err)
			require.Greater(t, next.leader.Token, seen)
			seen = next.leader.Token
		}
		resign(t, last)
		onlyTokensLeft(t, s)
	})
}
