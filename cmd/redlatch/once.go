package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/once"
)

// onceCommand is "redlatch once".
type onceCommand struct {
	connection *connection

	json     bool
	remember time.Duration
}

func newOnce(c *connection) *cobra.Command {
	o := &onceCommand{connection: c}
	const slotHelp = `
SLOT is the text that the program passes to Run. The slots of once.At and of contrib/cron are times in UTC,
such as 20261129T120000Z. Instead of both arguments, one can be a name that redlatch ls shows, such as
redlatch_once:{report}:20261129T120000Z.
`
	ls := &cobra.Command{
		Use:     "ls [flags] [PATTERN]",
		Aliases: []string{"list"},
		Short:   "List the slots of once-only work",
		Long: `List the slots of once-only work that run or have been done, as far as the server remembers, or those
whose work matches PATTERN: * is any text, ? any character, and [a-z] one of those. PATTERN may also match
the names of slots that redlatch ls shows.

STATE is running or done. SINCE is when the work was done, by the clock of the machine that did it. EXPIRES
is when the server forgets that, or when the lease of a run ends. HOLDER runs the work.

ls reads the names of all keys of the server with SCAN, as redlatch ls does, and only reads.

` + statusHelpOf("listed, even if there is nothing to list", "") + `
  128 + n  signal n ended ls`,
		Example: `  redlatch once ls
  redlatch once ls --json report | jq 'select(.held).slot.slot'`,
		Args: arguments(0, 1),
		RunE: o.list,
	}
	ls.Flags().BoolVar(&o.json, "json", false, "print a JSON object for each")
	done := &cobra.Command{
		Use:   "done [flags] NAME SLOT",
		Short: "Mark a slot as done, so that its work does not run",
		Long: `Mark SLOT of the once-only work NAME as done, so that its work does not run: because it was done by hand,
for example, or must not be done.
` + slotHelp + `
The slot stays done for --remember. After that, a program that still starts the work of this slot runs it.
If the server remembers the slot for longer already, that stays. done does not end a run in progress, which
redlatch once ls shows. Those that wait for that run find the slot done.

The output says whether the slot was done before.

` + statusHelpOf("the slot is done now, whether it was before or not", ""),
		Example: `  redlatch once done report 20261129T120000Z

  # The work is started again for a month.
  redlatch once done --remember 744h invoices 2026-11`,
		Args: arguments(1, 2),
		RunE: o.markDone,
	}
	done.Flags().DurationVar(&o.remember, "remember", once.DefaultRemember,
		"time for which the slot stays done; use the duration of once.Remember in the program")
	forget := &cobra.Command{
		Use:   "forget NAME SLOT",
		Short: "Forget that a slot is done, so that its work can run again",
		Long: `Forget that SLOT of the once-only work NAME is done. The next process that starts the work of this slot
runs it. forget does not start it, and does not affect a run in progress.
` + slotHelp + `
The output says whether the slot was done.

` + statusHelpOf("the slot is not done now, whether it was before or not", ""),
		Example: `  redlatch once forget report 20261129T120000Z
  redlatch once forget 'redlatch_once:{report}:20261129T120000Z'`,
		Args: arguments(1, 2),
		RunE: o.forget,
	}
	for _, cmd := range []*cobra.Command{done, forget} {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	return group(&cobra.Command{
		Use:   "once",
		Short: "List, mark or forget the slots of once-only work",
		Long: `List the slots of once-only work, such as cron jobs of several machines; mark one as done, or forget that it
is done. Programs run such work with client.Once of the Go library, or with contrib/cron.`,
		Example: `  redlatch once ls
  redlatch once forget report 20261129T120000Z`,
	}, ls, done, forget)
}

func (o *onceCommand) list(_ *cobra.Command, args []string) error {
	pattern, err := patternOf(args)
	if err != nil {
		return err
	}
	return o.connection.read(func(ctx context.Context, r *inspect.Reader) error {
		slots, err := list(ctx, r, pattern, false, isSlot)
		if err != nil {
			return err
		}
		return printSlots(os.Stdout, slots, o.json)
	})
}

// isSlot reports whether a name belongs to a slot.
func isSlot(name string) bool {
	_, _, ok := inspect.SlotOf(name)
	return ok
}

func printSlots(w io.Writer, slots []inspect.Object, asJSON bool) error {
	return printTable(w, slots, asJSON, "NAME\tSLOT\tSTATE\tSINCE\tEXPIRES\tWAITERS\tHOLDER", func(s inspect.Object) []string {
		return []string{
			printable(s.Slot.Work), printable(s.Slot.Slot), state(s), since(s), expiry(s), waiters(s), holder(s),
		}
	})
}

// isDone reports whether an object is a slot whose work has been done.
func isDone(o inspect.Object) bool { return o.Slot != nil && o.Slot.Done != nil }

// stateOfSlot is the state of a slot. One that someone has marked as done may still run.
func stateOfSlot(o inspect.Object) string {
	if o.Held && isDone(o) {
		return "running, done"
	}
	if o.Held {
		return "running"
	}
	if isDone(o) {
		return "done"
	}
	return "not done"
}

// since is when the work of a slot was done.
func since(o inspect.Object) string {
	if !isDone(o) || o.Slot.Done.Since == nil {
		return "-"
	}
	return o.Slot.Done.Since.Format(time.RFC3339)
}

// slotOf returns the work and the slot that the arguments of a command name.
func slotOf(cmd *cobra.Command, args []string) (work, slot string, err error) {
	if len(args) == 2 {
		return args[0], args[1], nil
	}
	work, slot, ok := inspect.SlotOf(args[0])
	if !ok {
		return "", "", fmt.Errorf("the slot is missing: %s", cmd.UseLine())
	}
	return work, slot, nil
}

func (o *onceCommand) markDone(cmd *cobra.Command, args []string) error {
	if err := session.CheckLease(o.remember); err != nil {
		return fmt.Errorf("--remember: %w", err)
	}
	return o.change(cmd, args, (*once.Once).MarkDone, "is done now", "was done already", once.Remember(o.remember))
}

func (o *onceCommand) forget(cmd *cobra.Command, args []string) error {
	return o.change(cmd, args, (*once.Once).Forget, "was done and can run again", "was not done")
}

// change changes the slot that the arguments name, and says whether that made a difference.
func (o *onceCommand) change(cmd *cobra.Command, args []string, change func(*once.Once, context.Context, string) (bool, error),
	changed, unchanged string, opts ...once.Option) error {
	work, slot, err := slotOf(cmd, args)
	if err != nil {
		return err
	}
	return o.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		made, err := change(client.Once(work, opts...), ctx, slot)
		if err != nil {
			return o.connection.nameDenied(ctx, err, inspect.Once, wire.OnceRun(work, slot))
		}
		if made {
			return printLine(work, slot, changed)
		}
		return printLine(work, slot, unchanged)
	})
}

// once explains a slot.
func (d *diagnosis) once() {
	o := d.last
	if done := o.Slot.Done; done != nil {
		when, memory := "", "for ever"
		if done.Since != nil {
			when = " since " + since(o)
		}
		if done.Left != nil {
			memory = "for " + remaining(done.Left)
		}
		d.say("Slot %s of %s is done%s, by %s. The server remembers that %s. To let the work run again, use this command: %s",
			o.Slot.Slot, o.Slot.Work, when, described(done.By), memory, advice(o, "once forget"))
	}
	if o.Held {
		d.lock()
	} else if !isDone(o) {
		d.say("Slot %s of %s is not done, and nobody runs its work. The next call of Run does.", o.Slot.Slot, o.Slot.Work)
		d.stuck()
	}
}
