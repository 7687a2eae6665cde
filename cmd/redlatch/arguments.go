package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// arguments checks the number of arguments, and that none is empty.
func arguments(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return fmt.Errorf("an argument is missing: %s", cmd.UseLine())
		case len(args) > most:
			return fmt.Errorf("there are too many arguments: %s", cmd.UseLine())
		case slices.Contains(args, ""):
			return errors.New("an argument is empty")
		}
		return nil
	}
}

// exclude has the flags of each pair exclude each other. The shell then completes one of them only.
func exclude(cmd *cobra.Command, pairs ...[2]string) {
	for _, pair := range pairs {
		cmd.MarkFlagsMutuallyExclusive(pair[:]...)
	}
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { // before the check of cobra, whose errors are long
		for _, pair := range pairs {
			if cmd.Flags().Changed(pair[0]) && cmd.Flags().Changed(pair[1]) {
				return fmt.Errorf("--%s and --%s exclude each other", pair[0], pair[1])
			}
		}
		return nil
	}
}

// checkKind returns an error if a value of --kind is not one of those.
func checkKind(kind string, known []string) error {
	if !slices.Contains(known, kind) {
		return fmt.Errorf("--kind %q: must be one of %s", kind, strings.Join(known, ", "))
	}
	return nil
}

// printLine prints a line to the standard output.
func printLine(words ...any) error {
	for i, word := range words {
		if s, ok := word.(string); ok {
			words[i] = printable(s)
		}
	}
	_, err := fmt.Println(words...)
	return err
}

// newEncoder returns an encoder whose output a terminal shows as it is.
func newEncoder(w io.Writer) *json.Encoder {
	e := json.NewEncoder(escaping{w})
	e.SetEscapeHTML(false)
	return e
}

// escaping is a writer of JSON that escapes the characters that a terminal may interpret, which can only
// be in strings. Each write is a whole value.
type escaping struct{ io.Writer }

func (e escaping) Write(p []byte) (int, error) {
	var out []byte
	for _, r := range string(p) {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	if _, err := e.Writer.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// number parses an argument.
func number[N int | int64](arg string, least, most N) (N, error) {
	n, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || n < int64(least) || n > int64(most) {
		return 0, fmt.Errorf("%q: must be a number from %d to %d", arg, least, most)
	}
	return N(n), nil
}

// group returns a command that only has others.
func group(cmd *cobra.Command, others ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs // else cobra takes an unknown command for an argument
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return fmt.Errorf("the command is missing: see %s --help", cmd.CommandPath())
	}
	cmd.AddCommand(others...)
	return cmd
}

// statusNo says that the command had no effect, or that a check has failed.
const statusNo = 1

// statusHelpOf returns the exit statuses for the help of a command; no is "" if it never applies.
func statusHelpOf(ok, no string) string {
	help := "Exit status:\n  0        " + ok
	if no != "" {
		help += "\n  1        " + no
	}
	return help + "\n  125      redlatch failed, for example because the server is unreachable"
}
