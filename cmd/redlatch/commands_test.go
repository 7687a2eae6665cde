package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// allCommands returns every command, apart from those of cobra.
func allCommands() []*cobra.Command {
	all := []*cobra.Command{newRoot()}
	for i := 0; i < len(all); i++ {
		all = append(all, all[i].Commands()...)
	}
	return all
}

// Each command explains itself, and its examples have valid flags and arguments.
func TestCommands(t *testing.T) {
	for _, cmd := range allCommands() {
		path := cmd.CommandPath()
		assert.Regexp(t, `^[A-Z].*[^.]$`, cmd.Short, path)
		assert.Regexp(t, `(?s)^[A-Z].*\S$`, cmd.Long, path)
		for line := range strings.Lines(cmd.Long + "\n" + cmd.Example) {
			assert.LessOrEqual(t, len(line), 110, "%s: %s", path, line)
		}
		calls := callsOf(t, cmd.Example)
		assert.NotEmpty(t, calls, path)
		own := false
		for _, args := range calls {
			root := newRoot()
			root.InitDefaultCompletionCmd(args...)
			called, rest, err := root.Find(args)
			require.NoError(t, err, args)
			require.NoError(t, called.ParseFlags(rest), args)
			require.NoError(t, called.ValidateArgs(called.Flags().Args()), args)
			require.NoError(t, called.ValidateFlagGroups(), args)
			require.True(t, called.Runnable(), args)
			own = own || strings.HasPrefix(called.CommandPath(), path)
		}
		assert.True(t, own, "%s: no example calls it", path)
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			assert.NotEmpty(t, f.Usage, "%s --%s", path, f.Name)
		})
	}
}

// Each command that does something explains its exit statuses, in their order.
func TestExitStatusesInHelp(t *testing.T) {
	for _, cmd := range allCommands() {
		if cmd.HasSubCommands() {
			continue
		}
		_, statuses, found := strings.Cut(cmd.Long, "\nExit status:\n")
		require.True(t, found, cmd.CommandPath())
		var numbers []string
		for _, match := range regexp.MustCompile(`(?m)^  (\d+) `).FindAllStringSubmatch(statuses, -1) {
			numbers = append(numbers, fmt.Sprintf("%3s", match[1]))
		}
		require.Contains(t, numbers, "125", cmd.CommandPath())
		require.True(t, slices.IsSorted(numbers), "%s: %v", cmd.CommandPath(), numbers)
	}
	require.NotContains(t, newMan().Long, "server")
}

// callsOf runs examples in a shell that knows no other command than redlatch, and returns the
// arguments of each call.
func callsOf(t *testing.T, example string) (calls [][]string) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", `redlatch() { printf '%s\0' "$@" >&3; printf '\1\0' >&3; echo 7; }`+"\n"+example)
	cmd.Env, cmd.Dir, cmd.ExtraFiles = []string{"PATH=/nonexistent"}, t.TempDir(), []*os.File{w}
	_ = cmd.Run() // commands behind a pipe are not found
	w.Close()
	recorded, err := io.ReadAll(r)
	require.NoError(t, err)
	for call := range strings.SplitSeq(string(recorded), "\x01\x00") {
		if call != "" {
			calls = append(calls, strings.Split(strings.TrimSuffix(call, "\x00"), "\x00"))
		}
	}
	return calls
}

// Each command has a manual page with its description, flags and examples.
func TestManual(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "share", "man1")
	require.Empty(t, succeeds(t, unreachable, "man", dir))
	pages := 0
	for _, cmd := range allCommands() {
		if cmd.Hidden {
			continue
		}
		pages++
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-") + ".1"
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		page := string(text)
		require.True(t, strings.HasPrefix(page, `.TH "REDLATCH`), name)
		for line := range strings.Lines(page) {
			require.Regexp(t, `^[^.']|^\.(TH|SH|nf|fi)\b`, line, name)
		}
		for _, title := range []string{"NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "SEE ALSO"} {
			require.Contains(t, page, "\n.SH "+title+"\n", name)
		}
		shown := unescaped.Replace(page)
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { require.Contains(t, shown, "--"+f.Name, name) })
		for line := range strings.Lines(cmd.Long + "\n" + cmd.Example) {
			require.Contains(t, shown, strings.TrimSpace(line), name)
		}
	}
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, pages)
}

// unescaped replaces the escapes of a page by what man(1) shows.
var unescaped = strings.NewReplacer(`\&`, "", `\-`, "-", `\(aq`, "'", `\(ga`, "`", `\(ha`, "^", `\(ti`, "~", `\e`, `\`)

func TestCompletion(t *testing.T) {
	require.True(t, strings.HasPrefix(succeeds(t, unreachable, "completion", "bash"), "# bash completion"))
	for _, row := range []struct{ args, want string }{
		{"unlock --kind ", strings.Join(kinds, "\n")},
		{"lock --kind ", strings.Join(kinds, "\n")},
		{"probe --kind ", strings.Join(probeKindFlags(), "\n")},
		{"verify --pubsub ", "auto\nsharded\nplain"},
		{"latch w", "wait\tWait until a latch is open"},
		{"permits drain ", ""}, // no files
		{"unlock ", ""},
	} {
		args := strings.Split(row.args, " ")
		r := finish(t, unreachable, append([]string{"__complete"}, args...)...)
		require.Zero(t, r.status, row.args)
		require.Equal(t, strings.TrimPrefix(row.want+"\n:4\n", "\n"), r.stdout, row.args)
	}
}
