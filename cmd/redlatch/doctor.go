package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/hub"
)

func newDoctor(c *connection) *cobra.Command {
	var watch time.Duration
	cmd := &cobra.Command{
		Use:   "doctor [flags] NAME",
		Short: "Explain why a lock is not free, or why its waiters do not get it",
		Long: `Explain why NAME is not free, or why its waiters do not get it.

doctor watches NAME until it changes hands or its lease is renewed, for --watch at most. redlatch
and Redisson renew a lease after a third of it: after 10 s, unless configured otherwise. For a longer
lease, doctor says which --watch shows whether it is renewed. It watches a semaphore for all of
--watch, because a permit that changes hands says little about the others; unless permits are free,
and nobody holds or awaits one. doctor only reads. For the rights of a
user and the settings of the server see "redlatch probe".

` + statusHelpOf("doctor found nothing wrong", "doctor found a problem") + `
  128 + n  signal n ended doctor`,
		Example: `  redlatch doctor orders
  redlatch doctor --watch 30s orders`,
		Args: arguments(1, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			if watch <= 0 {
				return fmt.Errorf("--watch %v: must be greater than zero", watch)
			}
			return c.read(func(ctx context.Context, r *inspect.Reader) error {
				seen, err := observe(ctx, r, args[0], watch)
				if err != nil {
					return err
				}
				seen.identify(ctx, r)
				problems, err := printDiagnosis(os.Stdout, seen)
				if err == nil && problems {
					err = exit{status: statusNo}
				}
				return err
			})
		},
	}
	cmd.Flags().DurationVar(&watch, "watch", 11*time.Second, "longest time to watch")
	return cmd
}

// observation is what doctor has seen of an object.
type observation struct {
	first, last inspect.Object
	renewed     bool // the lease of the same holder was extended
	changed     bool // another holder, or none; or another number of free permits
}

// identify finds the processes of the owners that were seen last.
func (o *observation) identify(ctx context.Context, r *inspect.Reader) {
	objects := []inspect.Object{o.last}
	r.Identify(ctx, objects)
	o.last = objects[0]
}

func (o observation) watched() time.Duration { return o.last.At.Sub(o.first.At) }

// warm is how long a client listens after its last waiter has left, and more.
const warm = hub.DefaultKeepWarm + 2*time.Second

// between is the time between two reads of doctor.
const between = 200 * time.Millisecond

// observe reads an object until it changes, for that long at most.
func observe(ctx context.Context, r *inspect.Reader, name string, watch time.Duration) (o observation, err error) {
	if o.first, err = r.Read(ctx, name); err != nil {
		return o, err
	}
	o.last = o.first
	for o.watched() < watch && !o.isAnswer() && !isSettled(o.first) {
		select {
		case <-time.After(between):
		case <-ctx.Done():
			return o, ctx.Err()
		}
		before := o.last
		if o.last, err = r.Read(ctx, name); err != nil {
			return o, err
		}
		o.changed = o.changed || holderIDs(before) != holderIDs(o.last) || before.Held != o.last.Held || free(before) != free(o.last)
		o.renewed = !o.changed && before.Expires != nil && o.last.Expires != nil && *o.last.Expires > *before.Expires
	}
	return o, nil
}

// isAnswer reports whether a lock was seen to be in use. Of the permits of a semaphore, others may be stuck.
func (o observation) isAnswer() bool {
	return (o.renewed || o.changed) && o.first.Kind != inspect.Semaphore
}

// isSettled reports whether there is nothing to watch.
func isSettled(o inspect.Object) bool {
	switch o.Kind {
	case inspect.Semaphore:
		return !o.Held && waiting(o) == 0 && o.Permits.Free > 0
	case inspect.Latch, inspect.Rate:
		return true
	}
	return !o.Held && (waiting(o) == 0 || isDone(o)) || o.Held && o.Expires == nil
}

// free is the number of free permits, 0 of other objects.
func free(o inspect.Object) int64 {
	if o.Permits == nil {
		return 0
	}
	return o.Permits.Free
}

// hasIDs reports whether an object is a semaphore whose permits have ids, as far as that can be seen.
func hasIDs(o inspect.Object) bool { return o.Permits != nil && o.Permits.Held >= 0 }

func holderIDs(o inspect.Object) (all string) {
	for _, h := range o.Holders {
		all += h.ID + "\n"
	}
	return all
}

// printDiagnosis prints what an observation means, and reports whether that includes problems.
func printDiagnosis(w io.Writer, seen observation) (problems bool, err error) {
	for _, s := range diagnose(seen) {
		text := s.text
		if s.problem {
			problems, text = true, "PROBLEM: "+text
		}
		if _, err := fmt.Fprintln(w, text); err != nil {
			return problems, err
		}
	}
	return problems, nil
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
		if o.Slot != nil {
			d.once()
			break
		}
		d.say("No key of %s exists: it is free.", o.Name)
		if d.changed {
			d.say("It was released while doctor watched.")
			break
		}
		if d.stuck() {
			break
		}
		d.say("If a client does not get it all the same, compare its server, database and name prefix.")
	case inspect.Other:
	case inspect.Counter:
		d.say("%s is the number %d, which may be a semaphore or a latch.", o.Name, *o.Count)
	case inspect.Semaphore:
		d.permits()
	case inspect.Latch:
		d.latch()
	case inspect.Rate:
		d.limit()
	case inspect.Once:
		d.once()
	default:
		d.lock()
	}
	if o.Unidentified != "" {
		d.say("%s", unidentified(o))
	}
	for _, a := range o.Anomalies {
		d.problem("%s", a.Text)
	}
	return d.statements
}

// process says where an owner runs.
func (d *diagnosis) process(o inspect.Owner) {
	if c := o.Connection; c != nil {
		d.say("That is process %d on host %s, connected from %s for %s. It sent its last request %s ago.",
			c.PID, c.Host, c.Address, c.Age, c.Idle)
	} else if o.IsLost() && d.last.Unidentified == "" {
		d.say("No connection has the name of that client: its process has ended or is disconnected, or gives its connections another name.")
	}
}

func (d *diagnosis) lock() {
	o := d.last
	d.say("%s is %s: %s.", o.Name, inspect.WithArticle(kindNames[o.Kind]), state(o))
	for _, h := range o.Holders {
		d.say("%s holds it%s; its lease %s.", described(h.Owner), mode(h), end(h.Lease))
		d.process(h.Owner)
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
		d.say("If the holder does not exist any more, use this command: %s", advice(o, "unlock --force"))
	case o.Held && d.watched() <= d.renewal():
		d.say("Its lease was not renewed for %s, but so long a lease is renewed later: use --watch %s to see that. "+
			"The lock is free in %s at the latest, unless it is renewed.",
			inspect.Millis(d.watched()), d.renewal().Truncate(time.Second)+2*time.Second, remaining(o.Expires))
	case o.Held:
		d.say("Its lease was not renewed for %s: it is fixed, or its holder has died or stalls. "+
			"The lock is free in %s at the latest.", inspect.Millis(d.watched()), remaining(o.Expires))
	}
	switch {
	case o.Kind != inspect.RWLock:
	case o.Waiting == 1:
		d.say("1 writer waits for the readers, so new readers of redlatch wait for it.")
	case o.Waiting > 1:
		d.say("%d writers wait for the readers, so new readers of redlatch wait for them.", o.Waiting)
	}
	d.queue()
	d.stuck()
}

// renewal is how long a holder that lives may take until it renews the lease. A lease is renewed
// after a third; what was left of it at first is all of it, or a part that is renewed earlier.
func (d *diagnosis) renewal() time.Duration {
	return (d.watched() + time.Duration(*d.last.Expires)) / 3
}

// stuck reports waiters that do not take a free lock, and whether there are any.
func (d *diagnosis) stuck() bool {
	o := d.last
	if !o.Held && !d.changed && o.Subscribers > 0 && len(o.Queue) == 0 && d.watched() > warm {
		d.problem("The lock was free for %s although %s to it. Their processes may be stopped, "+
			"or use another kind of lock under this name.", inspect.Millis(d.watched()), listeners(o.Subscribers))
		return true
	}
	return false
}

// queue explains the queue of a fair lock.
func (d *diagnosis) queue() {
	o := d.last
	if len(o.Queue) == 0 {
		return
	}
	head := o.Queue[0]
	d.say("%s in its queue. %s is the first.", are(len(o.Queue), "waiter"), described(head.Owner))
	d.process(head.Owner)
	if o.Held || d.changed {
		return
	}
	d.problem("The lock was free for %s, and its first waiter does not take it. "+
		"Others get the lock when the position of that waiter ends, in %s.", inspect.Millis(d.watched()), signOfLife(head))
}

func (d *diagnosis) permits() {
	o := d.last
	d.say("%s is %s: %s.", o.Name, inspect.WithArticle(kindNames[o.Kind]), state(o))
	forever := 0
	for _, h := range o.Holders {
		if h.Lease == nil {
			forever++
		}
	}
	switch {
	case forever == 1:
		d.problem("1 permit has no lease, as those of Redisson without one: if its process has died, only a release " +
			`by its id returns it (see "redlatch inspect" and "redlatch permits release").`)
	case forever > 1:
		d.problem("%d permits have no lease, as those of Redisson without one: if their process has died, only a release "+
			`by their ids returns them (see "redlatch inspect" and "redlatch permits release").`, forever)
	}
	if n := d.idle(); n == 1 {
		d.say("1 permit was held all the time, and its lease was not renewed for %s: it is fixed, or its holder has died or stalls.",
			inspect.Millis(d.watched()))
	} else if n > 1 {
		d.say("%d permits were held all the time, and their leases were not renewed for %s: they are fixed, "+
			"or their holders have died or stall.", n, inspect.Millis(d.watched()))
	}
	switch {
	case o.Waiting == 1:
		d.say("1 client has waited for longer than 100 ms, and comes first.")
	case o.Waiting > 1:
		d.say("%d clients have waited for longer than 100 ms, and come first.", o.Waiting)
	}
	if d.changed {
		d.say("Permits changed hands while doctor watched: the semaphore is in use.")
	}
	switch {
	case o.Permits.Free > 0 && o.Subscribers > 0 && !d.changed:
		d.say("%s although %s free: a waiter may request more than that.", listeners(o.Subscribers), are(int(o.Permits.Free), "permit"))
	case o.Permits.Free < 0 && hasIDs(o) && o.Permits.Size() > 0:
		d.say("The number of permits was reduced to %d: no permit is free until %d are released or end.",
			o.Permits.Size(), 1-o.Permits.Free)
	case o.Permits.Free <= 0 && hasIDs(o) && o.Permits.Size() == 0:
		d.say("The number of permits was reduced to 0: nobody acquires one until it is raised.")
	case o.Permits.Free <= 0 && !hasIDs(o) && !d.changed:
		// A semaphore whose permits have ids looks like one without while none is held. So this may be a drain,
		// which a released permit would undo.
		d.say("No permit was free for %s: all are held, or the semaphore is drained, perhaps on purpose. "+
			"The server has no record of the holders of permits without ids. Find out which it is before you add "+
			`or release permits (see "redlatch permits --help"): that ends a drain.`, inspect.Millis(d.watched()))
	case o.Permits.Free == 0 && len(o.Holders) > 0:
		d.say("No permit is free. The first lease %s, unless it is renewed.", end(soonest(o.Holders)))
	}
}

// idle returns the number of permits that were held all the time, and whose leases would have been renewed by a
// holder that lives.
func (d *diagnosis) idle() (n int) {
	ends := map[string]time.Time{}
	for _, h := range d.first.Holders {
		if h.Lease != nil {
			ends[h.ID] = d.first.At.Add(time.Duration(*h.Lease))
		}
	}
	for _, h := range d.last.Holders {
		first, known := ends[h.ID]
		if h.Lease == nil || !known {
			continue
		}
		left := time.Duration(*h.Lease)
		if !d.last.At.Add(left).After(first) && d.watched() > (d.watched()+left)/3 {
			n++
		}
	}
	return n
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
	if *o.Count <= 0 {
		d.say("The latch %s is open.", o.Name)
		return
	}
	d.say("The latch %s opens after %s of CountDown.", o.Name, count(*o.Count, "more call"))
	if o.Subscribers > 0 {
		d.say("%s for that.", listeners(o.Subscribers))
	}
	if o.Expires != nil {
		d.say("It opens in %s at the latest, when its key expires.", remaining(o.Expires))
	}
}

func (d *diagnosis) limit() {
	o, l := d.last, d.last.Limit
	if l.Used == nil {
		d.say("The rate limiter %s gives each client %s per %v. What each has used is in keys of its own.",
			o.Name, count(int(l.Rate), "permit"), l.Per)
		return
	}
	d.say("The rate limiter %s has given %d of %s.", o.Name, *l.Used, count(int(l.Rate), "permit"))
	if l.NextFree != nil && *l.Used >= l.Rate {
		d.say("The first of them comes back in %v, and all of them in %v at the latest.", *l.NextFree, l.Per)
	}
}

func listeners(n int) string {
	if n == 1 {
		return "1 connection listens"
	}
	return count(n, "connection") + " listen"
}

// are is a number of things that are something.
func are(n int, noun string) string {
	if n == 1 {
		return count(n, noun) + " is"
	}
	return count(n, noun) + " are"
}

// advice returns a shell command for an object. It quotes the name, which any client that may write keys
// can choose.
func advice(o inspect.Object, words string) string {
	prefix, separator := strings.TrimSuffix(o.Key, o.Name), " "
	if work, _, ok := inspect.SlotOf(o.Key); ok && o.Slot != nil {
		prefix = strings.TrimSuffix(work, o.Slot.Work)
	}
	if prefix != "" {
		prefix = " --prefix " + quoted(prefix)
	}
	if strings.HasPrefix(o.Name, "-") {
		separator = " -- "
	}
	return "redlatch" + prefix + " " + words + separator + quoted(o.Name)
}

var harmless = regexp.MustCompile(`^[\w@%+:,./-]+$`)

// quoted quotes a word for a shell. The form with $ keeps characters that a terminal interprets.
func quoted(word string) string {
	switch {
	case harmless.MatchString(word):
		return word
	case printable(word) == word:
		return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	var out strings.Builder
	for _, b := range []byte(word) {
		fmt.Fprintf(&out, `\x%02x`, b)
	}
	return "$'" + out.String() + "'"
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

// count is a number of things, of which one has that name.
func count[N int | int64](n N, noun string) string {
	if n == 1 {
		return fmt.Sprint(n, " ", noun)
	}
	return fmt.Sprint(n, " ", noun, "s")
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
	if h.Values > 0 {
		return " with " + count(h.Values, "value")
	}
	if h.Mode == "" {
		return ""
	}
	return " to " + h.Mode
}
