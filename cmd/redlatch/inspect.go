package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/redis/rueidis"
	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/wire"
)

func newInspect(c *connection) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "inspect [flags] NAME...",
		Short: "Show holders and waiters",
		Long: `Show what the server knows of each NAME: its kind, as far as its keys show it; the holders,
with the time left of their leases; the queue of a fair lock; the readers and writers of a
read-write lock; the permits of a semaphore; the count of a latch; the leader of an election;
whether a slot of once-only work runs or is done; and the connections that wait for a message.
Anomalies, which may keep waiters out, come last.

inspect only reads. It reads all keys of a NAME at one moment, and shows 1000 holders and
waiters at most. The connections of redlatch listen for some seconds after their last waiter has
left, so subscribers need not be waiters.

A client whose id is a UUID of version 7 is one of redlatch; then the id also shows when the
client was created. A client whose id has version 4 is one of Redisson. If the user may use CLIENT LIST,
inspect shows the process of a client of redlatch, as in 4711@web-3 for process 4711 on host web-3, and the
address and the age of its oldest connection, unless the application names its connections itself.
Of Redisson and of permits the server knows no more than the id. A fair lock for which nobody
waits has the keys of an ordinary lock, and is shown as one. A number without other keys may be a
semaphore or a latch.

With --json, the output is one JSON object for each NAME, with durations in milliseconds.

` + statusHelpOf("every NAME is shown, whether it exists or not", "") + `
  128 + n  signal n ended inspect`,
		Example: `  redlatch inspect orders
  redlatch inspect --json orders | jq '.holders[].client'`,
		Args: arguments(1, math.MaxInt),
		RunE: func(_ *cobra.Command, names []string) error {
			return c.read(func(ctx context.Context, r *inspect.Reader) error {
				objects, err := r.ReadAll(ctx, names)
				if err != nil {
					return err
				}
				r.Identify(ctx, objects)
				return printObjects(os.Stdout, objects, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printObjects(w io.Writer, objects []inspect.Object, asJSON bool) error {
	if asJSON {
		return printJSON(w, objects)
	}
	for i, o := range objects {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := printObject(w, o); err != nil {
			return err
		}
	}
	if i := slices.IndexFunc(objects, func(o inspect.Object) bool { return o.Unidentified != "" }); i >= 0 {
		_, err := fmt.Fprintf(w, "\n%s\n", unidentified(objects[i]))
		return err
	}
	return nil
}

// unidentified says why the processes of some owners are not shown.
func unidentified(o inspect.Object) string {
	return printable("The processes of some clients are unknown: " + o.Unidentified)
}

// printJSON prints a line for each object.
func printJSON(w io.Writer, objects []inspect.Object) error {
	e := newEncoder(w)
	for _, o := range objects {
		if err := e.Encode(o); err != nil {
			return err
		}
	}
	return nil
}

// kindNames are the kinds in the words of the documentation.
var kindNames = map[inspect.Kind]string{
	inspect.None: "no object", inspect.Lock: "lock", inspect.Fenced: "fenced lock", inspect.Fair: "fair lock",
	inspect.RWLock: "read-write lock", inspect.Plain: "plain lock", inspect.Semaphore: "semaphore",
	inspect.Latch: "count-down latch", inspect.Counter: "number", inspect.Election: "election",
	inspect.Once: "slot of once-only work", inspect.Rate: "rate limiter", inspect.Group: "group of values", inspect.Other: "another type of key",
}

// state is the state of an object in a few words.
func state(o inspect.Object) string {
	switch {
	case o.Permits != nil && o.Permits.Held >= 0 && o.Permits.Free < 0:
		return fmt.Sprintf("0 free, %d held, %d too many", o.Permits.Held, -o.Permits.Free)
	case o.Permits != nil && o.Permits.Held >= 0:
		return fmt.Sprintf("%d free, %d held", o.Permits.Free, o.Permits.Held)
	case o.Permits != nil:
		return fmt.Sprintf("%d free", o.Permits.Free)
	case o.Limit != nil:
		return stateOfLimit(*o.Limit)
	case o.Kind == inspect.Latch && *o.Count <= 0:
		return "open"
	case o.Count != nil:
		return strconv.FormatInt(*o.Count, 10)
	case o.Kind == inspect.None, !o.KnowsHolders():
		return "-"
	case o.Kind == inspect.Once:
		return stateOfSlot(o)
	case isWritten(o):
		return "held for writing"
	case o.Kind == inspect.RWLock && o.Held:
		return "held for reading"
	case o.Held:
		return "held"
	}
	return "free"
}

// stateOfLimit is the state of a rate limiter.
func stateOfLimit(l inspect.Limit) string {
	rate := fmt.Sprintf("%d per %v", l.Rate, l.Per)
	if l.Used == nil {
		return rate + " for each client"
	}
	return fmt.Sprintf("%d used of %s", *l.Used, rate)
}

// checkObject returns an error if an object is of another kind than those. It trusts a number, which
// may be anything, and a user who may not read: the change itself needs fewer rights.
func (c *connection) checkObject(ctx context.Context, name, what string, kinds ...inspect.Kind) error {
	return c.checkThat(ctx, name, what, func(o inspect.Object) bool { return slices.Contains(kinds, o.Kind) })
}

// checkThat is checkObject for objects of which one thing is true.
func (c *connection) checkThat(ctx context.Context, name, what string, is func(o inspect.Object) bool) error {
	o, err := c.object(ctx, name)
	var refused *rueidis.RedisError
	switch {
	case errors.As(err, &refused) && wire.KindOf(err) == nil:
		return nil
	case err != nil:
		return err
	case o.Kind == inspect.None, o.Kind == inspect.Counter, is(o):
		return nil
	}
	return fmt.Errorf("%s is %s, not a %s", printable(name), description(o), what)
}

// read runs f with a reader. A signal ends the program at once. So does a reader of the output that has gone.
func (c *connection) read(f func(ctx context.Context, r *inspect.Reader) error) error {
	return interruptible(0, func(ctx context.Context) error {
		signal.Reset(syscall.SIGPIPE)
		r, err := c.reader()
		if err != nil {
			return err
		}
		defer r.Conn.Close()
		return f(ctx, r)
	})
}

// object reads an object over a connection of its own.
func (c *connection) object(ctx context.Context, name string) (inspect.Object, error) {
	r, err := c.reader()
	if err != nil {
		return inspect.Object{}, err
	}
	defer r.Conn.Close()
	return r.Read(ctx, name)
}

// description is the kind of an object, with an article.
func description(o inspect.Object) string {
	switch {
	case o.Kind == inspect.Other:
		return inspect.WithArticle(o.Type) + " with other contents"
	case hasIDs(o):
		return "a semaphore whose permits have ids"
	}
	return inspect.WithArticle(kindNames[o.Kind])
}

// isWritten reports whether a writer, who may read too, holds a read-write lock.
func isWritten(o inspect.Object) bool {
	return slices.ContainsFunc(o.Holders, func(h inspect.Holder) bool { return h.Mode == "write" })
}

// printObject prints what is known of an object.
func printObject(w io.Writer, o inspect.Object) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(cells ...string) { fmt.Fprintln(t, strings.TrimRight(strings.Join(cells, "\t"), "\t")) }
	line("name", printable(o.Name))
	if o.Key != o.Name {
		line("key", printable(o.Key))
	}
	line("kind", kindNames[o.Kind])
	if o.Slot != nil {
		line("work", printable(o.Slot.Work))
		line("slot", printable(o.Slot.Slot))
	}
	line("state", state(o))
	if isDone(o) {
		line("done by", printable(o.Slot.Done.By.ID))
		line("done since", since(o))
	}
	if o.Expires != nil || o.Held && o.Permits == nil && o.Count == nil {
		line("expires", remaining(o.Expires))
	}
	if o.Token != nil {
		line("token", strconv.FormatInt(*o.Token, 10))
	}
	if o.Leader != nil {
		line("term", strconv.FormatInt(o.Leader.Token, 10), strconv.Quote(o.Leader.Value), ended(o.Leader.Current))
	}
	if o.Waiting > 0 {
		line("waiting", strconv.Itoa(o.Waiting))
	}
	if o.Subscribers >= 0 {
		line("subscribers", strconv.Itoa(o.Subscribers))
	}
	if len(o.Holders) > 0 {
		line()
		line("HOLDER", "LEASE", "LIBRARY", "")
		for _, h := range o.Holders {
			line(printable(h.ID), remaining(h.Lease), h.Library, notes(o, h))
		}
	}
	if len(o.Queue) > 0 {
		line()
		line("QUEUE", "ALIVE", "LIBRARY", "")
		for i, q := range o.Queue {
			line(printable(q.ID), signOfLife(q), q.Library, positioned(o, q, i+1))
		}
	}
	if o.Truncated {
		line()
		line("There are more than are shown.")
	}
	if len(o.Anomalies) > 0 {
		line()
		line("ANOMALIES")
		for _, a := range o.Anomalies {
			line(printable(a.Text))
		}
	}
	return t.Flush()
}

// remaining is the rest of a lease.
func remaining(lease *inspect.Millis) string {
	switch {
	case lease == nil:
		return "never"
	case *lease <= 0:
		return "over"
	}
	return lease.String()
}

func ended(current bool) string {
	if current {
		return "current"
	}
	return "ended"
}

// notes are what else is known of a holder.
func notes(o inspect.Object, h inspect.Holder) string {
	var all []string
	if h.Mode != "" {
		all = append(all, h.Mode)
	}
	if h.Values > 0 {
		all = append(all, count(h.Values, "value"))
	}
	if h.Count > 1 {
		all = append(all, fmt.Sprintf("%d holds", h.Count))
	}
	all = append(all, connected(o, h.Owner)...)
	if h.Started != nil {
		all = append(all, "client since "+inspect.Millis(o.At.Sub(*h.Started).Round(time.Second)).String())
	}
	return strings.Join(all, ", ")
}

// process is the process of an owner, or "" if it is unknown.
func process(o inspect.Owner) string {
	if o.Connection == nil {
		return ""
	}
	return printable(fmt.Sprintf("%d@%s", o.Connection.PID, o.Connection.Host))
}

// connected are what is known of the connections of an owner.
func connected(o inspect.Object, owner inspect.Owner) []string {
	if c := owner.Connection; c != nil {
		return []string{"process " + process(owner) + " at " + printable(c.Address), "connected for " + c.Age.String()}
	}
	if owner.IsLost() && o.Unidentified == "" {
		return []string{"no named connection"}
	}
	return nil
}

// signOfLife is how long a waiter keeps its position.
func signOfLife(q inspect.Waiter) string {
	if q.Alive != nil {
		return remaining(q.Alive)
	}
	return remaining(q.Deadline)
}

// positioned are the position of a waiter, and what else is known of it.
func positioned(o inspect.Object, q inspect.Waiter, position int) string {
	all := []string{strconv.Itoa(position)}
	if q.Listens {
		all = append(all, "listens")
	}
	return strings.Join(append(all, connected(o, q.Owner)...), ", ")
}
