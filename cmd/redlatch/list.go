package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/text"
)

func newList(c *connection) *cobra.Command {
	var asJSON, held, all bool
	cmd := &cobra.Command{
		Use:     "ls [flags] [PATTERN]",
		Aliases: []string{"list"},
		Short:   "List locks and other objects",
		Long: `List the locks, semaphores, latches, elections and slots of once-only work of the server, or those
whose names match PATTERN: * is any text, ? any character, and [a-z] one of those.

A slot has the name of the key of its lock, such as redlatch_once:{report}:20261129T120000Z. PATTERN may
also match the name of its work. "redlatch once ls" lists only slots, and when they were done.

ls reads all keys of the server with SCAN, 500 at a time, and looks into strings and hashes.
WAITERS counts the queue of a fair lock, or the connections that wait for a message. HOLDER is ? if
the server does not tell, as for a semaphore whose permits have no ids.

Without --all, ls lists nothing that an application may have stored for another purpose. With --all
it adds two kinds of strings. One that expires may be a plain lock of another library, such as
redsync; redlatch inspect shows its value. A number may be a semaphore or a latch without waiters
that no client of redlatch has used in the last minutes. A PATTERN that only such names match keeps
out the rest.

` + statusHelpOf("listed, even if there is nothing to list", "") + `
  128 + n  signal n ended ls`,
		Example: `  redlatch ls
  redlatch ls 'orders:*'
  redlatch ls --held --json

  # Also the locks of another library, which have these names.
  redlatch ls --all 'mutex:*'`,
		Args: arguments(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			pattern, err := patternOf(args)
			if err != nil {
				return err
			}
			return c.read(func(ctx context.Context, r *inspect.Reader) error {
				objects, err := list(ctx, r, pattern, all, func(string) bool { return true })
				if err != nil {
					return err
				}
				if held {
					objects = slices.DeleteFunc(objects, func(o inspect.Object) bool { return !o.Held })
				}
				return printList(os.Stdout, objects, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON object for each")
	cmd.Flags().BoolVar(&held, "held", false, "list only what is held")
	cmd.Flags().BoolVar(&all, "all", false, allUsage)
	return cmd
}

// allUsage describes the flag --all.
const allUsage = "add strings that expire and numbers, which may be locks of other libraries, idle semaphores or neither"

// patternOf returns the pattern among the arguments, or one that matches all names.
func patternOf(args []string) (string, error) {
	if len(args) == 0 {
		return "*", nil
	}
	return args[0], inspect.CheckPattern(args[0])
}

// list returns the objects whose names match the pattern and are wanted, by name: the objects of redlatch and
// Redisson, and with all also keys that may be objects.
func list(
	ctx context.Context, r *inspect.Reader, pattern string, all bool, isWanted func(name string) bool,
) (objects []inspect.Object, err error) {
	scanner, err := r.Scan(ctx, pattern)
	if err != nil {
		return nil, err
	}
	scanner.All = all
	seen := map[string]bool{}
	for more := true; more; {
		var names []string
		if names, more, err = scanner.Next(ctx); err != nil {
			return nil, err
		}
		names = slices.DeleteFunc(names, func(name string) bool {
			before := seen[name]
			seen[name] = true
			return before || !isWanted(name)
		})
		found, err := r.ReadSome(ctx, names)
		if err != nil {
			return nil, err
		}
		for _, o := range found {
			if o, ok := listed(o, all); ok {
				objects = append(objects, o)
			}
		}
	}
	slices.SortFunc(objects, func(a, b inspect.Object) int { return cmp.Compare(a.Name, b.Name) })
	return objects, nil
}

// listed returns an object as lists show it, and whether they do: if it is surely one of redlatch or Redisson,
// or with all, which adds what may be another library's. The value of that may be a secret of an application,
// so a list leaves it out.
func listed(o inspect.Object, all bool) (shown inspect.Object, ok bool) {
	if o.Kind == inspect.None || o.Kind == inspect.Other {
		return o, false
	}
	if o.Kind == inspect.Counter {
		return o, all
	}
	if o.Kind == inspect.Plain && o.Holders[0].Library == "other" && o.Subscribers <= 0 {
		o.Held = false
		o.Holders = nil
		return o, all
	}
	return o, true
}

func printList(w io.Writer, objects []inspect.Object, asJSON bool) error {
	return printTable(w, objects, asJSON, "NAME\tKIND\tSTATE\tEXPIRES\tWAITERS\tHOLDER", func(o inspect.Object) []string {
		return []string{printable(o.Name), string(o.Kind), state(o), expiry(o), waiters(o), holder(o)}
	})
}

// printTable prints a row for each object, or a JSON object.
func printTable(w io.Writer, objects []inspect.Object, asJSON bool, header string, cells func(inspect.Object) []string) error {
	if asJSON {
		return printJSON(w, objects)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, header)
	for _, o := range objects {
		fmt.Fprintln(t, strings.Join(cells(o), "\t"))
	}
	return t.Flush()
}

// printable returns a text without characters that a terminal interprets.
func printable(s string) string {
	if text.Printable(s) {
		return s
	}
	return strconv.Quote(s)
}

func expiry(o inspect.Object) string {
	ends := o.Expires != nil && (o.Held || o.Count != nil || o.Kind == inspect.Plain)
	if isDone(o) || o.Held && o.Permits == nil || ends {
		return remaining(o.Expires)
	}
	return "-"
}

// waiting returns the number of waiters that are known of.
func waiting(o inspect.Object) int { return max(len(o.Queue), o.Waiting, o.Subscribers) }

func waiters(o inspect.Object) string {
	if n := waiting(o); n > 0 {
		return strconv.Itoa(n)
	}
	return "-"
}

// holder is the first holder and the number of the others.
func holder(o inspect.Object) string {
	switch n := len(o.Holders); {
	case !o.KnowsHolders():
		return "?"
	case n == 0:
		return "-"
	case n == 1:
		return printable(o.Holders[0].ID)
	default:
		return fmt.Sprintf("%s and %d more", printable(o.Holders[0].ID), n-1)
	}
}
