package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/pubsub"
)

func newDoctor(c *connection) *cobra.Command {
	var watch time.Duration
	cmd := &cobra.Command{
		Use:   "doctor [flags] NAME",
		Short: "Explain why a lock is not free, or why its waiters do not get it",
		Long: `Explain why NAME is not free, or why its waiters do not get it.

doctor watches NAME until it changes hands or its lease is renewed, for --watch at most. redlatch
and Redisson renew a lease after a third of it: after 10 s, unless configured otherwise. doctor
only reads. For the rights of a user and the settings of the server see "redlatch probe".

The exit status is 0 if doctor found nothing wrong, and 1 if it found a problem.`,
		Example: `  redlatch doctor orders
  redlatch doctor --watch 30s orders`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := c.reader()
			if err != nil {
				return err
			}
			defer r.Conn.Close()
			seen, err := observe(cmd.Context(), r, args[0], watch)
			if err != nil {
				return err
			}
			if problems := printDiagnosis(os.Stdout, seen); problems {
				return exit{status: 1}
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&watch, "watch", 11*time.Second, "longest time to watch")
	return cmd
}

// observation is what doctor has seen of an object.
type observation struct {
	first, last inspect.Object
	renewed     bool // the lease of the same holder was extended
	changed     bool // another holder, or none
}

func (o observation) watched() time.Duration { return o.last.At.Sub(o.first.At) }

// warm is how long a client listens after its last waiter has left, and more.
const warm = pubsub.DefaultKeepWarm + 2*time.Second

// between is the time between two reads of doctor.
const between = 200 * time.Millisecond

// observe reads an object until it changes, for that long at most.
func observe(ctx context.Context, r *inspect.Reader, name string, watch time.Duration) (o observation, err error) {
	if o.first, err = r.Read(ctx, name); err != nil {
		return o, err
	}
	o.last = o.first
	for o.watched() < watch && !o.renewed && !o.changed && !isSettled(o.first) {
		select {
		case <-time.After(between):
		case <-ctx.Done():
			return o, ctx.Err()
		}
		before := o.last
		if o.last, err = r.Read(ctx, name); err != nil {
			return o, err
		}
		o.changed = holderIDs(before) != holderIDs(o.last) || before.Held != o.last.Held
		o.renewed = !o.changed && before.Expires != nil && o.last.Expires != nil && *o.last.Expires > *before.Expires
	}
	return o, nil
}

// isSettled reports whether there is nothing to watch.
func isSettled(o inspect.Object) bool {
	return !o.Held && waiting(o) == 0 || o.Held && o.Expires == nil && o.Permits == nil
}

func holderIDs(o inspect.Object) (all string) {
	for _, h := range o.Holders {
		all += h.ID + "\n"
	}
	return all
}

// printDiagnosis prints what an observation means, and reports whether that includes problems.
func printDiagnosis(w io.Writer, seen observation) (problems bool) {
	for _, s := range diagnose(seen) {
		if !s.problem {
			fmt.Fprintln(w, s.text)
			continue
		}
		problems = true
		fmt.Fprintln(w, "PROBLEM:", s.text)
	}
	return problems
}

// statement is a sentence of a diagnosis.
type statement struct {
	problem bool
	text    string
}

type diagnosis struct {
	observation
	statements []statement
}

func (d *diagnosis) say(format string, args ...any) {
	d.statements = append(d.statements, statement{false, printable(fmt.Sprintf(format, args...))})
}

func (d *diagnosis) problem(format string, args ...any) {
	d.statements = append(d.statements, statement{true, printable(fmt.Sprintf(format, args...))})
}

// diagnose explains an observation.
func diagnose(seen observation) []statement {
	d := &diagnosis{observation: seen}
	o := d.last
	switch o.Kind {
	case inspect.None:
		d.say("No key of %s exists: it is free.", o.Name)
		if d.changed {
			d.say("It was released while doctor watched.")
			break
		}
		d.say("If a client does not get it all the same, compare its server, database and name prefix.")
	case inspect.Other:
	case inspect.Counter:
		d.say("%s is the number %d, which may be a semaphore or a latch.", o.Name, *o.Count)
	case inspect.Semaphore, inspect.Permits:
		d.permits()
	case inspect.Latch:
		d.latch()
	default:
		d.lock()
	}
	for _, a := range o.Anomalies {
		d.problem("%s", a.Text)
	}
	return d.statements
}

func (d *diagnosis) lock() {
	o := d.last
	d.say("%s is a %s: %s.", o.Name, kindNames[o.Kind], state(o))
	for _, h := range o.Holders {
		d.say("%s holds it%s; its lease %s.", described(h.Owner), mode(h), end(h.Lease))
	}
	if o.Held && o.Subscribers > 0 && len(o.Queue) == 0 {
		d.say("%s to it.", listeners(o.Subscribers))
	}
	switch {
	case d.changed:
		d.say("It changed hands while doctor watched: it is in use, and not stuck.")
	case d.renewed:
		d.say("Its lease was renewed while doctor watched: the holder's process lives.")
	case o.Held && o.Expires == nil:
		d.say(`If the holder does not exist any more, use "redlatch unlock --force %s".`, o.Name)
	case o.Held:
		d.say("Its lease was not renewed for %s: it is fixed, or its holder has died or stalls. "+
			"The lock is free in %s at the latest.", inspect.Millis(d.watched()), remaining(o.Expires))
	}
	if o.Kind == inspect.RWLock && o.Waiting > 0 {
		d.say("%d writers wait for the readers, so new readers of redlatch wait for them.", o.Waiting)
	}
	d.queue()
	if !o.Held && !d.changed && o.Subscribers > 0 && len(o.Queue) == 0 && d.watched() > warm {
		d.problem("The lock was free for %s although %s to it. Their processes may be stopped, "+
			"or use another kind of lock under this name.", inspect.Millis(d.watched()), listeners(o.Subscribers))
	}
}

// queue explains the queue of a fair lock.
func (d *diagnosis) queue() {
	o := d.last
	if len(o.Queue) == 0 {
		return
	}
	head := o.Queue[0]
	d.say("%d waiters are in its queue. %s is the first.", len(o.Queue), described(head.Owner))
	if o.Held || d.changed {
		return
	}
	d.problem("The lock was free for %s, and its first waiter does not take it. "+
		"Others get the lock when the position of that waiter ends, in %s.", inspect.Millis(d.watched()), signOfLife(head))
}

func (d *diagnosis) permits() {
	o := d.last
	d.say("%s is a %s: %s.", o.Name, kindNames[o.Kind], state(o))
	forever := 0
	for _, h := range o.Holders {
		if h.Lease == nil {
			forever++
		}
	}
	if forever > 0 {
		d.problem("%d permits have no lease, as those of Redisson without one: if their process has died, only a release "+
			`by their ids returns them (see "redlatch inspect" and "redlatch permits release").`, forever)
	}
	if o.Waiting > 0 {
		d.say("%d clients have waited for longer than 100 ms, and come first.", o.Waiting)
	}
	switch {
	case o.Permits.Free > 0 && o.Subscribers > 0 && !d.changed:
		d.say("%s although permits are free: they may request more permits than that.", listeners(o.Subscribers))
	case o.Permits.Free == 0 && o.Permits.Held < 0:
		d.say("No permit is free. A semaphore without ids does not know who holds them: if a holder has died, "+
			`"redlatch permits release --plain %s" returns its permits.`, o.Name)
	case o.Permits.Free == 0 && len(o.Holders) > 0:
		d.say("No permit is free. The first lease %s, unless it is renewed.", end(soonest(o.Holders)))
	}
}

// soonest returns the lease that ends first, or nil.
func soonest(holders []inspect.Holder) (least *inspect.Millis) {
	for _, h := range holders {
		if h.Lease != nil && (least == nil || *h.Lease < *least) {
			least = h.Lease
		}
	}
	return least
}

func (d *diagnosis) latch() {
	o := d.last
	if !o.Held {
		d.say("The latch %s is open.", o.Name)
		return
	}
	d.say("The latch %s opens after %d more calls of CountDown. %s for that.", o.Name, *o.Count, listeners(o.Subscribers))
	if o.Expires != nil {
		d.say("It opens in %s at the latest, when its key expires.", remaining(o.Expires))
	}
}

func listeners(n int) string {
	if n == 1 {
		return "1 connection listens"
	}
	return fmt.Sprintf("%d connections listen", n)
}

// end says when a lease ends.
func end(lease *inspect.Millis) string {
	switch {
	case lease == nil:
		return "never ends"
	case *lease <= 0:
		return "is over"
	}
	return "ends in " + lease.String()
}

// described describes a client.
func described(o inspect.Owner) string {
	text := o.ID
	if o.Library != "" && o.Library != "other" {
		text += " of " + o.Library
	}
	return text
}

func mode(h inspect.Holder) string {
	if h.Mode == "" {
		return ""
	}
	return " to " + h.Mode
}
