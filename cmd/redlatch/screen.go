package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
)

// screen is what top shows.
type screen struct {
	sample   func(ctx context.Context) sample
	unlock   func(ctx context.Context, name string) (held bool, err error)
	place    string
	interval time.Duration

	width, height int
	last          sample
	rows          []row // those of the last sample that the filter matches, in order
	selected      string
	top           int // the first row that is visible
	scroll        int // the first line of the details that is
	column        int // by which the rows are sorted
	reverse       bool
	filter        string
	filtering     bool
	detail        bool
	confirming    bool
	paused        bool
	notice        string
}

func newScreen(
	sample func(ctx context.Context) sample, unlock func(ctx context.Context, name string) (bool, error),
	place string, interval time.Duration,
) *screen {
	return &screen{sample: sample, unlock: unlock, place: place, interval: interval, width: 80, height: 24}
}

// column is a column of the list.
type column struct {
	title string
	cell  func(r row) string
	// compare puts the most interesting rows first.
	compare func(a, b row) int
	right   bool
}

var columns = []column{
	{"NAME", func(r row) string { return printable(r.Name) }, func(a, b row) int { return cmp.Compare(a.Name, b.Name) }, false},
	{"KIND", func(r row) string { return string(r.Kind) }, func(a, b row) int { return cmp.Compare(a.Kind, b.Kind) }, false},
	{"STATE", func(r row) string { return state(r.Object) }, func(a, b row) int { return -cmp.Compare(rank(a), rank(b)) }, false},
	{"WAITERS", func(r row) string { return waiters(r.Object) }, func(a, b row) int {
		return -cmp.Compare(waiting(a.Object), waiting(b.Object))
	}, true},
	{"HAND-OVERS", func(r row) string { return perSecond(r.rate) }, func(a, b row) int { return -cmp.Compare(a.rate, b.rate) }, true},
	{"EXPIRES", func(r row) string { return expiry(r.Object) }, func(a, b row) int { return cmp.Compare(left(a), left(b)) }, true},
	{"PROCESS", func(r row) string { return cmp.Or(firstProcess(r), "-") }, func(a, b row) int {
		return cmp.Compare(firstProcess(a), firstProcess(b))
	}, false},
	{"HOLDER", func(r row) string { return holder(r.Object) }, func(a, b row) int {
		return cmp.Compare(holder(a.Object), holder(b.Object))
	}, false},
}

// The columns by which the rows are sorted at first.
const (
	waitersColumn   = 3
	handOversColumn = 4
)

func perSecond(rate float64) string {
	if rate < 0.05 {
		return "-"
	}
	return strconv.FormatFloat(rate, 'f', 1, 64)
}

// firstProcess is the process of the first holder, or "" if it is unknown.
func firstProcess(r row) string {
	if len(r.Holders) == 0 {
		return ""
	}
	return process(r.Holders[0].Owner)
}

// left returns the rest of a lease, for sorting.
func left(r row) inspect.Millis {
	if !r.Held || r.Expires == nil {
		return inspect.Millis(1<<63 - 1)
	}
	return *r.Expires
}

type (
	tick    struct{}
	outcome string // of a command, to be shown
)

// Init implements tea.Model.
func (s *screen) Init() tea.Cmd {
	s.column = waitersColumn
	return s.refresh
}

// refresh takes a sample.
func (s *screen) refresh() tea.Msg {
	ctx, cancel := context.WithTimeout(context.Background(), max(s.interval, 5*time.Second))
	defer cancel()
	return s.sample(ctx)
}

// Update implements tea.Model.
func (s *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case sample:
		if msg.err != nil {
			msg.rows, msg.at = s.last.rows, s.last.at
		}
		s.last = msg
		s.arrange()
		return s, tea.Tick(s.interval, func(time.Time) tea.Msg { return tick{} })
	case tick:
		if s.paused {
			return s, tea.Tick(s.interval, func(time.Time) tea.Msg { return tick{} })
		}
		return s, s.refresh
	case outcome:
		s.notice = string(msg)
	case tea.PasteMsg:
		if s.filtering {
			s.setFilter(s.filter + msg.Content)
		}
	case tea.KeyPressMsg:
		return s, s.press(msg)
	}
	return s, nil
}

// press handles a key.
func (s *screen) press(key tea.KeyPressMsg) tea.Cmd {
	name := key.String()
	if name == "ctrl+c" {
		return tea.Interrupt
	}
	if name == "ctrl+z" {
		return tea.Suspend
	}
	s.notice = ""
	switch {
	case s.confirming:
		s.confirming = false
		if name == "y" {
			return s.unlockSelected()
		}
		s.notice = "not unlocked"
	case s.filtering:
		s.edit(name, key.Text)
	case s.detail:
		return s.pressInDetails(name)
	default:
		return s.pressInList(name)
	}
	return nil
}

// edit edits the filter.
func (s *screen) edit(name, text string) {
	switch name {
	case "enter":
		s.filtering = false
	case "esc":
		s.filtering = false
		s.setFilter("")
	case "backspace":
		if runes := []rune(s.filter); len(runes) > 0 {
			s.setFilter(string(runes[:len(runes)-1]))
		}
	default:
		s.setFilter(s.filter + text)
	}
}

func (s *screen) setFilter(filter string) {
	s.filter = filter
	s.arrange()
}

func (s *screen) pressInList(name string) tea.Cmd {
	page := max(1, s.listHeight())
	switch name {
	case "q":
		return tea.Quit
	case "up", "k":
		s.move(-1)
	case "down", "j":
		s.move(1)
	case "pgup":
		s.move(-page)
	case "pgdown":
		s.move(page)
	case "home":
		s.move(-len(s.rows))
	case "end":
		s.move(len(s.rows))
	case "enter":
		s.detail, s.scroll = s.position() >= 0, 0
	case "esc":
		s.setFilter("")
	case "/":
		s.filtering = true
	case "s":
		s.column, s.reverse = (s.column+1)%len(columns), false
		s.arrange()
	case "r":
		s.reverse = !s.reverse
		s.arrange()
	case "p":
		s.paused = !s.paused
	case "u":
		s.confirm()
	}
	return nil
}

func (s *screen) pressInDetails(name string) tea.Cmd {
	switch name {
	case "q", "esc", "enter":
		s.detail = false
		s.arrange()
	case "up", "k":
		s.scroll = max(0, s.scroll-1)
	case "down", "j":
		s.scroll = min(s.scroll+1, max(0, len(s.details())-2))
	case "p":
		s.paused = !s.paused
	case "u":
		s.confirm()
	}
	return nil
}

// confirm asks whether to unlock the selected lock.
func (s *screen) confirm() {
	switch at := s.position(); {
	case at < 0:
	case isDone(s.rows[at].Object) && !s.rows[at].Held:
		s.notice = "work that is done cannot be unlocked: see redlatch once forget"
	case !isForcible(s.rows[at].Kind):
		s.notice = inspect.WithArticle(kindNames[s.rows[at].Kind]) + " cannot be unlocked"
	default:
		s.confirming = true
	}
}

// isForcible reports whether objects of a kind can be unlocked by force.
func isForcible(kind inspect.Kind) bool {
	return slices.Contains([]inspect.Kind{
		inspect.Lock, inspect.Fair, inspect.Fenced, inspect.Plain, inspect.RWLock, inspect.Election, inspect.Once,
	}, kind)
}

func (s *screen) unlockSelected() tea.Cmd {
	name := s.selected
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		switch held, err := s.unlock(ctx, name); {
		case err != nil:
			return outcome(err.Error())
		case !held:
			return outcome(printable(name) + " was not held")
		}
		return outcome(printable(name) + " is unlocked")
	}
}

// arrange filters and sorts the rows of the last sample.
func (s *screen) arrange() {
	s.rows = s.rows[:0]
	for _, r := range s.last.rows {
		if strings.Contains(strings.ToLower(r.Name), strings.ToLower(s.filter)) {
			s.rows = append(s.rows, r)
		}
	}
	slices.SortFunc(s.rows, func(a, b row) int {
		order := columns[s.column].compare(a, b)
		if s.reverse {
			order = -order
		}
		return cmp.Or(order, columns[waitersColumn].compare(a, b), columns[handOversColumn].compare(a, b), cmp.Compare(a.Name, b.Name))
	})
	if s.position() < 0 && !s.detail {
		s.selected = ""
		s.move(0)
	}
	s.show()
}

// position returns the place of the selected row, or -1.
func (s *screen) position() int {
	return slices.IndexFunc(s.rows, func(r row) bool { return r.Name == s.selected })
}

// move selects another row.
func (s *screen) move(by int) {
	if len(s.rows) > 0 {
		s.selected = s.rows[min(max(s.position()+by, 0), len(s.rows)-1)].Name
	}
	s.show()
}

// show scrolls to the selected row.
func (s *screen) show() {
	at, height := max(0, s.position()), max(1, s.listHeight())
	s.top = min(max(s.top, at-height+1), at)
	s.top = max(0, min(s.top, len(s.rows)-height))
}

// listHeight is the number of rows that fit: there are two lines above, and two below.
func (s *screen) listHeight() int { return s.height - 4 }

var (
	bold     = lipgloss.NewStyle().Bold(true)
	reversed = lipgloss.NewStyle().Reverse(true)
	alarming = lipgloss.NewStyle().Foreground(lipgloss.Red)
	faint    = lipgloss.NewStyle().Faint(true)
)

// View implements tea.Model.
func (s *screen) View() tea.View {
	lines := []string{s.header()}
	if s.detail {
		lines = append(lines, s.details()...)
	} else {
		lines = append(lines, s.list()...)
	}
	for len(lines) < s.height-2 {
		lines = append(lines, "")
	}
	lines = append(lines[:max(0, s.height-2)], s.status(), faint.Render(s.help()))
	lines = lines[max(0, len(lines)-s.height):]
	for i, line := range lines {
		lines[i] = ansi.Truncate(line, s.width, "")
	}
	v := tea.NewView(strings.Join(lines, "\n"))
	v.AltScreen, v.WindowTitle = true, "redlatch top"
	return v
}

func (s *screen) header() string {
	held, contended := 0, 0
	for _, r := range s.last.rows {
		if r.Held {
			held++
		}
		if waiting(r.Object) > 0 {
			contended++
		}
	}
	text := fmt.Sprintf("redlatch top  %s  %d names, %d held, %d contended", s.place, len(s.last.rows), held, contended)
	switch {
	case s.paused:
		text += "  paused"
	case !s.last.at.IsZero() && !s.last.scanned:
		text += "  scanning"
	}
	if s.last.skipped > 0 {
		text += fmt.Sprintf("  %d not refreshed", s.last.skipped)
	}
	if slices.ContainsFunc(s.last.rows, func(r row) bool { return r.Unidentified != "" }) {
		text += "  processes unknown"
	}
	return bold.Render(text)
}

// list returns the lines of the list.
func (s *screen) list() []string {
	last := max(s.top, min(len(s.rows), s.top+s.listHeight()))
	cells := [][]string{nil}
	for i, c := range columns {
		title := c.title
		if i == s.column {
			title += "*"
		}
		cells[0] = append(cells[0], title)
	}
	for _, r := range s.rows[s.top:last] {
		var line []string
		for _, c := range columns {
			line = append(line, c.cell(r))
		}
		cells = append(cells, line)
	}
	lines := s.aligned(cells)
	for i := range lines {
		switch {
		case i == 0:
			lines[0] = bold.Render("  " + lines[0])
		case s.rows[s.top+i-1].Name == s.selected:
			lines[i] = reversed.Render("> " + lines[i])
		case len(s.rows[s.top+i-1].Anomalies) > 0:
			lines[i] = alarming.Render("! " + lines[i])
		default:
			lines[i] = "  " + lines[i]
		}
	}
	if len(s.rows) == 0 {
		lines = append(lines, "  "+s.nothing())
	}
	return lines
}

// nothing says why the list is empty.
func (s *screen) nothing() string {
	switch {
	case s.last.at.IsZero():
		return "reading..."
	case s.filter != "":
		return "no name contains " + strconv.Quote(s.filter)
	}
	return "no locks"
}

// aligned returns the lines of a table. Names are shortened so that the other columns fit.
func (s *screen) aligned(cells [][]string) []string {
	widths := make([]int, len(columns))
	for _, line := range cells {
		for i, cell := range line {
			widths[i] = max(widths[i], lipgloss.Width(cell))
		}
	}
	const gap, margin, leastName = 2, 2, 12
	others := margin
	for _, width := range widths[1:] {
		others += gap + width
	}
	widths[0] = min(widths[0], max(leastName, s.width-others))
	var lines []string
	for _, line := range cells {
		var out strings.Builder
		for i, cell := range line {
			cell = ansi.Truncate(cell, widths[i], "…")
			pad := strings.Repeat(" ", widths[i]-lipgloss.Width(cell))
			if i > 0 {
				out.WriteString(strings.Repeat(" ", gap))
			}
			if columns[i].right {
				out.WriteString(pad + cell)
			} else {
				out.WriteString(cell + pad)
			}
		}
		lines = append(lines, strings.TrimRight(out.String(), " "))
	}
	return lines
}

// details returns the lines about the selected object.
func (s *screen) details() []string {
	at := s.position()
	if at < 0 {
		return []string{"", printable(s.selected) + " is gone"}
	}
	var text strings.Builder
	_ = printObjects(&text, []inspect.Object{s.rows[at].Object}, false)
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	return append([]string{""}, lines[min(s.scroll, len(lines)-1):]...)
}

// status is the line for questions and results.
func (s *screen) status() string {
	switch {
	case s.confirming:
		return alarming.Render("Unlock " + printable(s.selected) + " although its holder may be working? y/n")
	case s.filtering:
		return "filter: " + s.filter + "_"
	case s.notice != "":
		return printable(s.notice)
	case s.last.err != nil && s.last.at.IsZero():
		return alarming.Render(printable(s.last.err.Error()))
	case s.last.err != nil:
		return alarming.Render(fmt.Sprintf("as of %s: %s", s.last.at.Format(time.TimeOnly), printable(s.last.err.Error())))
	case s.filter != "":
		return "filter: " + printable(s.filter)
	}
	return ""
}

func (s *screen) help() string {
	switch {
	case s.confirming:
		return "y unlock  other keys: back"
	case s.filtering:
		return "enter keep the filter  esc drop it"
	case s.detail:
		return "esc back  up/down scroll  u unlock  p pause"
	}
	return "up/down select  enter details  / filter  s sort  r reverse  u unlock  p pause  q quit"
}
