package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/wire"
)

// player uses a screen as a person would.
type player struct {
	t        *testing.T
	s        *screen
	next     sample
	unlocked []string
	err      error // of the next unlock
}

func play(t *testing.T, rows ...row) *player {
	p := &player{t: t, next: sample{rows: rows, scanned: true, at: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}}
	p.s = newScreen(func(context.Context) sample { return p.next }, func(_ context.Context, name string) (bool, error) {
		p.unlocked = append(p.unlocked, name)
		return name != "free", p.err
	}, "redis://h", time.Second)
	require.NotNil(t, p.s.Init())
	p.send(tea.WindowSizeMsg{Width: 90, Height: 10})
	p.refresh()
	return p
}

func (p *player) send(msg tea.Msg) tea.Cmd {
	_, cmd := p.s.Update(msg)
	return cmd
}

func (p *player) refresh() { p.send(p.s.refresh()) }

// press presses keys and runs what they start.
func (p *player) press(keys ...string) {
	for _, key := range keys {
		code := map[string]rune{
			"enter": tea.KeyEnter, "esc": tea.KeyEscape, "up": tea.KeyUp, "down": tea.KeyDown, "backspace": tea.KeyBackspace,
			"home": tea.KeyHome, "end": tea.KeyEnd, "pgup": tea.KeyPgUp, "pgdown": tea.KeyPgDown,
		}
		msg := tea.KeyPressMsg{Code: code[key]}
		if code[key] == 0 {
			msg = tea.KeyPressMsg{Code: []rune(key)[0], Text: key}
		}
		require.Equal(p.t, key, msg.String())
		if cmd := p.send(msg); cmd != nil {
			p.send(cmd())
		}
	}
}

// lines returns what is shown, without styles and empty lines.
func (p *player) lines() (lines []string) {
	text := ansi.Strip(p.s.View().Content)
	require.LessOrEqual(p.t, strings.Count(text, "\n")+1, p.s.height)
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \n")
		require.LessOrEqual(p.t, ansi.StringWidth(line), p.s.width)
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// selected returns the line that is selected.
func (p *player) selected() string {
	for _, line := range p.lines() {
		if rest, ok := strings.CutPrefix(line, "> "); ok {
			return strings.Fields(rest)[0]
		}
	}
	return ""
}

// order returns the names in the list.
func (p *player) order() (names []string) {
	for _, line := range p.lines()[2:] {
		if strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "> ") || strings.HasPrefix(line, "! ") {
			names = append(names, strings.Fields(line[2:])[0])
		}
	}
	return names
}

func lockRow(name string, waiting int, rate float64) row {
	return row{inspect.Object{
		Name: name, Key: name, Kind: inspect.Lock, Held: true, Subscribers: waiting, Expires: new(inspect.Millis(9 * time.Second)),
		Holders: []inspect.Holder{{Owner: inspect.Owner{ID: "owner of " + name}, Lease: new(inspect.Millis(9 * time.Second))}},
	}, rate}
}

func TestScreenShowsTheMostContendedFirst(t *testing.T) {
	free := row{Object: inspect.Object{Name: "free", Kind: inspect.Fenced}}
	odd := lockRow("odd", 0, 0)
	odd.Anomalies = []inspect.Anomaly{{Code: "no-expiry"}}
	a := lockRow("a", 1, 2.5)
	a.Holders[0].Connection = &inspect.Connection{Process: wire.Process{Host: "web-3", PID: 7}}
	p := play(t, free, lockRow("b", 1, 0), a, lockRow("c", 7, 0), odd)
	require.Equal(t, []string{
		"redlatch top  redis://h  5 names, 4 held, 3 contended",
		"  NAME  KIND    STATE  WAITERS*  HAND-OVERS  EXPIRES  PROCESS  HOLDER",
		"> c     lock    held          7           -       9s  -        owner of c",
		"  a     lock    held          1         2.5       9s  7@web-3  owner of a",
		"  b     lock    held          1           -       9s  -        owner of b",
		"  free  fenced  free          -           -        -  -        -",
		"! odd   lock    held          -           -       9s  -        owner of odd",
		"up/down select  enter details  / filter  s sort  r reverse  u unlock  p pause  q quit",
	}, p.lines())
	p.press("r")
	require.Equal(t, []string{"free", "odd", "a", "b", "c"}, p.order())
	p.press("s") // hand-overs
	require.Equal(t, []string{"a", "c", "b", "free", "odd"}, p.order())
	p.press("s", "r") // expires
	require.Equal(t, "free", p.order()[0])
	p.press("s", "r") // process
	require.Equal(t, "a", p.order()[0])
	p.press("s", "s") // name
	require.Equal(t, []string{"a", "b", "c", "free", "odd"}, p.order())
	p.press("s") // kind
	require.Equal(t, "free", p.order()[0])
	p.press("s", "r") // state
	require.Equal(t, "free", p.order()[0])
}

// The selection stays with a name wherever that goes.
func TestScreenKeepsTheSelection(t *testing.T) {
	p := play(t, lockRow("a", 3, 0), lockRow("b", 2, 0), lockRow("c", 1, 0))
	p.press("down")
	require.Equal(t, "b", p.selected())
	p.next.rows = []row{lockRow("a", 3, 0), lockRow("b", 9, 0), lockRow("c", 1, 0)}
	p.refresh()
	require.Equal(t, []string{"b", "a", "c"}, p.order())
	require.Equal(t, "b", p.selected())
	p.next.rows = p.next.rows[:1]
	p.refresh()
	require.Equal(t, "a", p.selected(), "b is gone")
	p.next.rows = nil
	p.refresh()
	require.Contains(t, p.lines(), "  no locks")
	p.press("down", "up", "enter", "u", "end")
	require.Empty(t, p.selected())
}

func TestScreenScrolls(t *testing.T) {
	var rows []row
	for i := range 100 {
		rows = append(rows, lockRow(fmt.Sprintf("n%02d", i), 0, 0))
	}
	p := play(t, rows...)
	const fits = 6 // of ten lines
	require.Equal(t, "n00", p.selected())
	require.Len(t, p.order(), fits)
	p.press("pgdown")
	require.Equal(t, "n06", p.selected())
	p.press("end", "down")
	require.Equal(t, "n99", p.selected())
	require.Equal(t, "n94", p.order()[0])
	p.press("up", "k", "pgup")
	require.Equal(t, "n91", p.selected())
	require.Len(t, p.order(), fits)
	p.press("home", "j")
	require.Equal(t, "n01", p.selected())
	for _, height := range []int{1, 2, 3, 4, 5, 200} {
		p.send(tea.WindowSizeMsg{Width: 20, Height: height})
		p.lines()
		p.press("pgdown")
		p.lines()
	}
}

func TestScreenFilters(t *testing.T) {
	p := play(t, lockRow("orders:1", 0, 0), lockRow("Orders:2", 0, 0), lockRow("jobs", 0, 0))
	p.press("/", "o", "r", "d")
	require.Contains(t, p.lines(), "filter: ord_")
	require.Equal(t, []string{"Orders:2", "orders:1"}, p.order())
	p.press("q", "backspace", "enter")
	require.Contains(t, p.lines(), "filter: ord")
	require.Equal(t, "Orders:2", p.selected())
	p.press("esc")
	require.Len(t, p.order(), 3)
	p.press("/")
	p.send(tea.PasteMsg{Content: "job"})
	require.Equal(t, []string{"jobs"}, p.order())
	p.press("x")
	require.Contains(t, p.lines(), `  no name contains "jobx"`)
	p.press("esc")
	require.Len(t, p.order(), 3)
	require.NotContains(t, strings.Join(p.lines(), "\n"), "filter:")
}

func TestScreenShowsDetails(t *testing.T) {
	p := play(t, lockRow("a", 0, 0), lockRow("b", 0, 0))
	p.press("down", "enter")
	require.Contains(t, p.lines(), "name         b")
	require.NotContains(t, p.lines(), "name         a")
	p.press("down", "down", "up")
	require.NotContains(t, p.lines(), "name         b", "it has scrolled")
	for range 50 {
		p.press("down")
	}
	require.NotEmpty(t, p.lines())
	p.next.rows = p.next.rows[:1]
	p.refresh()
	require.Contains(t, p.lines(), "b is gone")
	p.press("esc")
	require.Equal(t, []string{"a", "b"}[:1], p.order())
}

func TestScreenUnlocksAfterAConfirmation(t *testing.T) {
	latch := row{Object: inspect.Object{Name: "z", Kind: inspect.Latch, Held: true, Count: new(int64(2))}}
	p := play(t, lockRow("a", 0, 0), lockRow("free", 0, 0), latch)
	p.press("u")
	require.Contains(t, p.lines(), "Unlock a although its holder may be working? y/n")
	p.press("n")
	require.Contains(t, p.lines(), "not unlocked")
	p.press("u", "enter")
	require.Empty(t, p.unlocked)
	p.press("u", "y")
	require.Equal(t, []string{"a"}, p.unlocked)
	require.Contains(t, p.lines(), "a is unlocked")
	p.press("down", "enter", "u", "y") // also from the details
	require.Equal(t, []string{"a", "free"}, p.unlocked)
	require.Contains(t, p.lines(), "free was not held")
	p.err = errors.New("no\x1b[2J")
	p.press("u", "y")
	require.Contains(t, p.lines(), `"no\x1b[2J"`)
	p.press("esc", "end", "u")
	require.Contains(t, p.lines(), "a count-down latch cannot be unlocked")
	p.press("y")
	require.Len(t, p.unlocked, 3)
	require.True(t, isForcible(inspect.Election))

	done := row{Object: inspect.Object{Name: "s", Kind: inspect.Once, Slot: &inspect.Slot{Done: &inspect.Done{}}}}
	p = play(t, done)
	p.press("u")
	require.Contains(t, p.lines(), "work that is done cannot be unlocked: see redlatch once forget")
	p.press("y")
	require.Empty(t, p.unlocked)
	done.Held = true // it runs once more
	p = play(t, done)
	p.press("u", "y")
	require.Equal(t, []string{"s"}, p.unlocked)
}

// Each sample leads to the next one, after the interval, unless the screen is paused.
func TestScreenRefreshes(t *testing.T) {
	p := play(t, lockRow("a", 0, 0))
	require.NotNil(t, p.send(p.next), "a tick follows")
	require.IsType(t, sample{}, p.send(tick{})())
	p.press("p")
	require.Contains(t, p.lines()[0], "paused")
	require.NotNil(t, p.send(tick{}), "ticks go on")
	p.press("p")
	p.next.scanned, p.next.skipped = false, 5
	p.refresh()
	require.Contains(t, p.lines()[0], "scanning  5 not refreshed")
	p.next.skipped, p.next.rows[0].Unidentified = 0, "NOPERM"
	p.refresh()
	require.Contains(t, p.lines()[0], "scanning  processes unknown")
	p.send(tea.WindowSizeMsg{Width: 90, Height: 30})
	p.press("enter")
	require.Contains(t, p.lines(), "The processes of some clients are unknown: NOPERM")
	p.press("esc")
	require.Equal(t, tea.Quit(), p.send(tea.KeyPressMsg{Code: 'q', Text: "q"})())
	require.Equal(t, tea.Interrupt(), p.send(tea.KeyPressMsg{Code: 'c', Mod: tea.ModCtrl})())
	require.Equal(t, tea.Suspend(), p.send(tea.KeyPressMsg{Code: 'z', Mod: tea.ModCtrl})())
}

// Long and strange names leave room for the other columns.
func TestScreenShortensNames(t *testing.T) {
	p := play(t, lockRow(strings.Repeat("long-", 50), 2, 0), lockRow("漢字漢字\x1b[2J", 1, 0))
	lines := p.lines()
	require.Contains(t, lines[2], "…")
	require.Contains(t, lines[2], "owner of")
	require.Contains(t, lines[3], `"漢字漢字\x`)
}
