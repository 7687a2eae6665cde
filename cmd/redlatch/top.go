package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/term"
	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
)

func newTop(c *connection) *cobra.Command {
	var interval time.Duration
	var all bool
	cmd := &cobra.Command{
		Use:   "top [flags] [PATTERN]",
		Short: "Watch the busiest and the most contended locks",
		Long: `Show the locks, semaphores, latches, elections and slots of once-only work of the server in the terminal,
or those whose names match PATTERN, and refresh them every --interval. The most contended come first.

top finds contended names immediately, by their channels. It finds all other names step by step,
with SCAN. It never uses KEYS or MONITOR, and reads at most ` + fmt.Sprint(maxRead) + ` names at a time: those that are
contended or held come first. HAND-OVERS is how often a name was seen to change its holder, for each
second; of a fenced lock it counts every acquisition, of the others one for each refresh at most.
With --all, top shows what "redlatch ls --all" lists.
PROCESS is the process of the holder and its host, as "redlatch inspect" shows it. top reads CLIENT LIST
once for a refresh, and spends at most a hundredth of its time on that.

Keys:
  up, down, pgup, pgdn, home, end    select a name
  enter                              show its holders and waiters; esc goes back
  /                                  filter by a part of the name; esc ends the filter
  s                                  sort by the next column; r reverses the order
  u                                  open the lock although it is held, after a confirmation
  p                                  pause
  q, ctrl+c                          quit

` + statusHelpOf("the user has quit with q", "") + `
  128 + n  signal n ended top, or ctrl+c as signal 2`,
		Example: `  redlatch top
  redlatch top --interval 500ms 'orders:*'`,
		Args: arguments(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			pattern, err := patternOf(args)
			if err != nil {
				return err
			}
			if interval < leastInterval {
				return fmt.Errorf("--interval %v: must be at least %v", interval, leastInterval)
			}
			if !term.IsTerminal(os.Stdin.Fd()) || !term.IsTerminal(os.Stdout.Fd()) {
				return errors.New("top needs a terminal: see redlatch ls")
			}
			var r *inspect.Reader
			if err := interruptible(0, func(ctx context.Context) (err error) {
				if r, err = c.reader(); err == nil {
					_, err = r.Scan(ctx, pattern)
				}
				return err
			}); err != nil {
				return err
			}
			defer r.Conn.Close()
			source := &sampler{reader: r, pattern: pattern, all: all, budget: interval / 5}
			return show(newScreen(source.sample, c.forceUnlock, place(c.address()), interval))
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two refreshes")
	cmd.Flags().BoolVar(&all, "all", false, allUsage)
	return cmd
}

// show runs a screen until its user or a signal ends it, and restores the terminal.
func show(s *screen) error {
	signals := notify()
	defer signal.Stop(signals)
	ctx, cancel := untilSignal()
	defer cancel()
	_, err := tea.NewProgram(s, tea.WithoutSignalHandler(), tea.WithContext(ctx)).Run()
	switch {
	case ctx.Err() != nil:
		return exitBy(<-signals)
	case errors.Is(err, tea.ErrInterrupted):
		return exitBy(syscall.SIGINT)
	}
	return err
}

// leastInterval keeps top from being a load.
const leastInterval = 100 * time.Millisecond

// place returns what is shown of the URL of a server, which may have a password anywhere else.
func place(address string) string {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" {
		return "the server"
	}
	return u.Scheme + "://" + u.Host
}

// forceUnlock opens a lock whatever its kind, and reports whether it was held.
func (c *connection) forceUnlock(ctx context.Context, name string) (held bool, err error) {
	client, err := c.open(ctx, c.address())
	if err != nil {
		return false, err
	}
	defer client.Close()
	return (&unlockCommand{connection: c}).unlock(ctx, client, name)
}

// maxRead is the number of objects that are read for a sample.
const maxRead = 1000

// row is an object in the list.
type row struct {
	inspect.Object
	rate float64 // hand-overs for each second
}

// sample is what a refresh has found.
type sample struct {
	rows    []row
	scanned bool // all keys were looked at once
	skipped int  // names that were not read this time
	err     error
	at      time.Time
}

// sampler finds and reads objects, a part of them at a time.
type sampler struct {
	reader  *inspect.Reader
	pattern string
	all     bool          // also what may be no object
	budget  time.Duration // for the scan of a sample

	scanner *inspect.Scanner
	scanned bool
	known   map[string]row
}

// sample reads the objects once more. It blocks for some replies, and for the budget.
func (s *sampler) sample(ctx context.Context) sample {
	err := s.find(ctx)
	if err == nil {
		err = s.read(ctx)
	}
	if err != nil {
		return sample{err: err, at: time.Now()}
	}
	found := sample{scanned: s.scanned, skipped: max(0, len(s.known)-maxRead), at: time.Now()}
	for _, r := range s.known {
		if r.Kind != "" { // it was read before
			found.rows = append(found.rows, r)
		}
	}
	return found
}

// find adds names: those for which somebody waits, and those of the next keys.
func (s *sampler) find(ctx context.Context) error {
	if s.known == nil {
		s.known = map[string]row{}
	}
	var err error
	if s.scanner == nil {
		if s.scanner, err = s.reader.Scan(ctx, s.pattern); err != nil {
			return err
		}
		s.scanner.All = s.all
	}
	contended, err := s.reader.Contended(ctx)
	if err != nil {
		return err
	}
	s.add(slices.DeleteFunc(contended, func(name string) bool { return !s.scanner.Matches(name) }))
	for began, more := time.Now(), true; more && time.Since(began) < s.budget; {
		var names []string
		if names, more, err = s.scanner.Next(ctx); err != nil {
			return err
		}
		s.add(names)
		if !more {
			s.scanner, s.scanned = nil, true // from the beginning, next time
		}
	}
	return nil
}

func (s *sampler) add(names []string) {
	for _, name := range names {
		if _, ok := s.known[name]; !ok {
			s.known[name] = row{Object: inspect.Object{Name: name}}
		}
	}
}

// read reads the most important of the known names.
func (s *sampler) read(ctx context.Context) error {
	all := make([]row, 0, len(s.known))
	for _, r := range s.known {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b row) int {
		return cmp.Or(-cmp.Compare(waiting(a.Object), waiting(b.Object)), -cmp.Compare(rank(a), rank(b)), a.At.Compare(b.At))
	})
	all = all[:min(len(all), maxRead)]
	names := make([]string, len(all))
	for i, r := range all {
		names[i] = r.Name
	}
	objects, err := s.reader.ReadSome(ctx, names)
	if err != nil {
		return err
	}
	s.reader.Identify(ctx, objects)
	for _, r := range all {
		delete(s.known, r.Name)
		if len(objects) == 0 || objects[0].Name != r.Name {
			continue // the user may not read it
		}
		if o, ok := listed(objects[0], s.all); ok {
			s.known[r.Name] = row{o, r.rateAfter(o)}
		}
		objects = objects[1:]
	}
	return nil
}

// rank puts what is held, and what was never read, before the rest.
func rank(r row) int {
	if r.Held || r.Kind == "" {
		return 1
	}
	return 0
}

// rateAfter returns the new rate when the object is o now. Older hand-overs count less.
func (r row) rateAfter(o inspect.Object) float64 {
	elapsed := o.At.Sub(r.At).Seconds()
	if r.Kind == "" || elapsed <= 0 {
		return r.rate
	}
	changes := 0.0
	switch {
	case r.Token != nil && o.Token != nil:
		changes = float64(max(0, *o.Token-*r.Token))
	case holderIDs(r.Object) != holderIDs(o):
		changes = 1
	}
	weight := 0.3
	if r.rate == 0 {
		weight = 1
	}
	return (1-weight)*r.rate + weight*changes/elapsed
}
