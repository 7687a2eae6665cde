package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"
	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/supervise"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/semaphore"
)

// leastTTL is the least value of --ttl: the least watchdog timeout.
const leastTTL = 100 * time.Millisecond

// kinds are the values of --kind.
var kinds = []string{"lock", "fair", "read", "write", "fenced", "plain", "spin"}

// lockCommand is "redlatch lock".
type lockCommand struct {
	connection *connection

	kind                          string
	wait, lease, atLeast, maxHold time.Duration
	ttl                           time.Duration
	try                           bool
	permits                       int
	red, names                    []string
	keepURL, quiet                bool
	conflict                      int // the status if the lock is not acquired
}

func newLock(c *connection) *cobra.Command {
	l := &lockCommand{connection: c}
	cmd := &cobra.Command{
		Use:   "lock [flags] NAME... -- COMMAND [ARG...]",
		Short: "Run a command while holding a lock",
		Long: `Acquire the lock NAME, run COMMAND while holding it, and exit with the status of COMMAND.
With several names, COMMAND runs while redlatch holds all of them.

COMMAND runs in a process group of its own. redlatch forwards signals to that group. A signal that arrives
during the wait for the lock ends redlatch. redlatch renews the lock until COMMAND ends.

If the lock is lost, or the lease or --max-hold is about to end, the group gets SIGTERM. SIGKILL
follows after a sixth of the lease or of --max-hold, after 10 s at most, and always before the lease
ends on the server. On Linux the group is killed if redlatch dies. The lock is then free when the lease
is over.

redlatch ends only what it may signal. If COMMAND becomes another user, for example by sudo, run
redlatch as this user: sudo redlatch lock NAME -- COMMAND. Otherwise COMMAND goes on when the lock is
lost, and the exit status is 122.

COMMAND may read the terminal. Ctrl-Z stops redlatch together with COMMAND, so that nothing renews
the lock; COMMAND goes on after fg or bg, unless the lease is over.

The environment of COMMAND contains REDLATCH_NAME, and REDLATCH_TOKEN if the lock is
fenced, or REDLATCH_PERMIT with --permits. It lacks REDLATCH_URL and REDLATCH_RED, which may have
passwords, unless --keep-url is given. redlatch prints nothing to standard output.

Use --name for a name that begins with a dash, or that somebody else chooses.

redlatch lock does not run on Windows.

` + statusHelp,
		Example: `  # One backup at a time in the whole cluster; wait for a minute at most.
  redlatch lock --wait 1m backup -- pg_dump -f /backups/app.sql app

  # A cron job of several machines: one of them runs it, the others skip it.
  redlatch lock --try --quiet --conflict-status 0 --at-least 30s cron:report -- /usr/local/bin/report

  # Four downloads at a time.
  redlatch lock --permits 4 downloads -- curl -O https://example.com/large.iso

  # Two accounts together, and the fencing token for a database.
  redlatch lock account:7 account:9 -- ./transfer
  redlatch lock --kind fenced ledger -- sh -c 'psql -v token=$REDLATCH_TOKEN -f close.sql'

  # A majority of three independent servers.
  redlatch lock --red redis://a:6379,redis://b:6379,redis://c:6379 deploy -- ./deploy.sh`,
		DisableFlagsInUseLine: true,
		RunE:                  l.run,
	}
	f := cmd.Flags()
	f.StringVar(&l.kind, "kind", "lock", "kind of lock: "+strings.Join(kinds, ", "))
	f.DurationVar(&l.wait, "wait", 0, "longest wait for the lock and the server (default: until a signal)")
	f.BoolVar(&l.try, "try", false, "wait neither for the lock nor for the server")
	f.DurationVar(&l.ttl, "ttl", redlatch.DefaultWatchdogTimeout, "lease, which is renewed until COMMAND ends")
	f.DurationVar(&l.lease, "lease", 0, "fixed lease, which is not renewed: COMMAND must end before it")
	f.DurationVar(&l.atLeast, "at-least", 0, "least time for which the lock is held, even if COMMAND ends sooner; not if it does not start")
	f.DurationVar(&l.maxHold, "max-hold", 0, "longest time for which COMMAND may run")
	f.IntVar(&l.permits, "permits", 0, "NAME is a semaphore with this many permits; hold one")
	f.StringSliceVar(&l.red, "red", nil,
		"URLs of independent servers: hold the lock on a majority of them (default: $REDLATCH_RED, unless there is --url or --permits)")
	f.StringArrayVar(&l.names, "name", nil, "NAME, which may begin with a dash; may be repeated")
	f.IntVar(&l.conflict, "conflict-status", statusNotAcquired, "exit status if another process holds the lock")
	f.BoolVar(&l.quiet, "quiet", false, "print nothing if another process holds the lock")
	f.BoolVar(&l.keepURL, "keep-url", false, "leave REDLATCH_URL and REDLATCH_RED in the environment of COMMAND")
	exclude(cmd, [2]string{"wait", "try"}, [2]string{"lease", "ttl"}, [2]string{"lease", "max-hold"},
		[2]string{"permits", "red"}, [2]string{"permits", "kind"}, [2]string{"permits", "at-least"})
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(kinds, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// isInvalid returns an error for arguments that make no sense together.
func (l *lockCommand) isInvalid(cmd *cobra.Command, names, command []string) error {
	switch {
	case len(names) == 0:
		return errors.New("the name of the lock is missing: redlatch lock NAME -- COMMAND")
	case len(command) == 0:
		return errors.New("the command is missing: redlatch lock NAME -- COMMAND")
	case l.ttl < leastTTL:
		return fmt.Errorf("--ttl %v: must be at least %v", l.ttl, leastTTL)
	case l.conflict < 0 || l.conflict > 255:
		return fmt.Errorf("--conflict-status %d: must be from 0 to 255", l.conflict)
	case cmd.Flags().Changed("permits") && l.permits < 1:
		return fmt.Errorf("--permits %d: must be at least 1", l.permits)
	case cmd.Flags().Changed("red") && (len(l.red) == 0 || slices.Contains(l.red, "")):
		return errors.New("--red: a URL is missing")
	case len(l.red) > 0 && l.connection.url != "":
		return errors.New("--red and --url exclude each other")
	case l.kind == "fenced" && (len(names) > 1 || len(l.red) > 0):
		return errors.New("--kind fenced: a token is of one lock: only one NAME is possible, and no --red")
	case l.kind == "read" && l.atLeast > 0:
		return errors.New("--at-least: a read lock has no least time")
	case l.permits > 0 && len(names) > 1:
		return errors.New("--permits: only one NAME is possible")
	}
	if err := checkKind(l.kind, kinds); err != nil {
		return err
	}
	for _, d := range []string{"wait", "lease", "at-least", "max-hold"} {
		value, _ := cmd.Flags().GetDuration(d)
		if !cmd.Flags().Changed(d) {
			continue
		}
		if value <= 0 {
			return fmt.Errorf("--%s %v: must be greater than zero", d, value)
		}
		if (d == "lease" || d == "at-least") && session.CheckLease(value) != nil {
			return fmt.Errorf("--%s %v: must be from a millisecond to %v", d, value, lock.MaxLease)
		}
	}
	if l.lease > 0 && l.atLeast > l.lease {
		return fmt.Errorf("--at-least %v: must not exceed --lease %v", l.atLeast, l.lease)
	}
	if l.maxHold > 0 && l.atLeast > l.maxHold {
		return fmt.Errorf("--at-least %v: must not exceed --max-hold %v", l.atLeast, l.maxHold)
	}
	return nil
}

// options returns those of the acquisition. --at-least is not among them: the least time is for a command
// that has started. Neither is --max-hold, which bounds the command.
func (l *lockCommand) options() []lock.Option {
	// Signals end the wait, and are forwarded afterwards.
	opts := []lock.Option{lock.Parent(context.Background())}
	if l.try {
		opts = append(opts, lock.Wait(0))
	}
	if l.wait > 0 {
		opts = append(opts, lock.Wait(l.wait))
	}
	if l.lease > 0 {
		opts = append(opts, lock.Lease(l.lease))
	}
	return opts
}

// grace is the time between SIGTERM and SIGKILL.
func (l *lockCommand) grace() time.Duration {
	lease := l.ttl
	if l.lease > 0 {
		lease = l.lease
	}
	if l.maxHold > 0 {
		lease = min(lease, l.maxHold)
	}
	return min(lease/6, 10*time.Second)
}

// split returns the names and the command that the arguments have.
func (l *lockCommand) split(cmd *cobra.Command, args []string) (names, command []string) {
	if at := cmd.ArgsLenAtDash(); at >= 0 {
		return append(l.names, args[:at]...), args[at:]
	}
	if len(l.names) > 0 {
		return l.names, args
	}
	if len(args) > 1 {
		return args[:1], args[1:]
	}
	return args, nil
}

// environment returns the variables of this process that a command gets, except for some names.
func (l *lockCommand) environment(except ...string) []string {
	if !l.keepURL {
		except = append(except, "REDLATCH_URL", "REDLATCH_RED")
	}
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.Contains(except, name)
	})
}

func (l *lockCommand) run(cmd *cobra.Command, args []string) error {
	names, command := l.split(cmd, args)
	if red := os.Getenv("REDLATCH_RED"); red != "" && !cmd.Flags().Changed("red") && l.connection.url == "" && l.permits == 0 {
		l.red = strings.Split(red, ",")
	}
	if err := l.isInvalid(cmd, names, command); err != nil {
		return err
	}
	if !supervise.Supported {
		return errors.New("redlatch lock does not run on Windows, where it could not end the command in time if the lock is lost: " +
			"acquire the lock in the program, with the library")
	}
	child := exec.Command(command[0], command[1:]...)
	if child.Err != nil {
		return notStarted(child.Err) // before the lock is acquired in vain
	}
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr

	signals := notify()
	defer signal.Stop(signals)
	wait, cancel := untilSignal()
	defer cancel()
	clients, err := l.connect(wait)
	if err == nil {
		defer closeAll(clients)
		var h held
		if h, err = l.acquire(wait, clients, names); err == nil {
			return l.supervise(child, h, names, signals) // a signal of the last moment too
		}
	}
	return l.failed(wait, signals, err, l.object(), names)
}

// failed returns the error of an exit without an acquisition, which has failed with err. wait ends with a signal.
func (l *lockCommand) failed(wait context.Context, signals <-chan os.Signal, err error, of inspect.Kind, names []string) error {
	if wait.Err() != nil {
		return exitBy(<-signals)
	}
	if errors.Is(err, lock.ErrNotAcquired) {
		if l.quiet {
			err = nil
		}
		return exit{l.conflict, err}
	}
	if len(l.red) > 0 {
		return err // which names the server
	}
	return l.connection.nameDenied(wait, err, of, names...)
}

// object returns the kind of the objects that NAME is one of.
func (l *lockCommand) object() inspect.Kind {
	if l.permits > 0 {
		return inspect.Semaphore
	}
	if family(l.kind) == "read-write" {
		return inspect.RWLock
	}
	return inspect.Kind(l.kind)
}

// supervise runs the command under the lock, and releases the lock.
func (l *lockCommand) supervise(child *exec.Cmd, h held, names []string, signals chan os.Signal) error {
	child.Env = l.environment("REDLATCH_TOKEN", "REDLATCH_PERMIT") // of a lock around this one
	child.Env = append(child.Env, "REDLATCH_NAME="+strings.Join(names, ","))
	child.Env = append(child.Env, h.environment()...)
	begun := time.Now()
	bounds := supervise.Bounds{Grace: l.grace()}
	if l.maxHold > 0 {
		bounds.End, bounds.Over = begun.Add(l.maxHold), fmt.Errorf("--max-hold %v is over", l.maxHold)
	}
	result, startErr := supervise.Run(child, h, bounds, signals)
	if result.Left { // the lock is left to its lease
		return exit{statusLeft, fmt.Errorf("%s: processes of the command go on, because redlatch may not signal them "+
			"(run redlatch as their user, as in: sudo redlatch lock): %w", strings.Join(names, ","), result.Lost)}
	}
	if startErr == nil && l.atLeast > 0 {
		h.keepUntil(begun.Add(l.atLeast))
	}
	err := h.release()
	switch {
	case errors.Is(startErr, supervise.ErrLate):
		return exit{statusLost, fmt.Errorf("%s: %w", strings.Join(names, ","), startErr)}
	case startErr != nil:
		return notStarted(startErr)
	case result.Lost != nil:
		return exit{statusLost, fmt.Errorf("%s: the command was ended: %w", strings.Join(names, ","), result.Lost)}
	case errors.Is(err, lock.ErrLost):
		return exit{statusLost, fmt.Errorf("%s: %w", strings.Join(names, ","), err)}
	case err != nil:
		fmt.Fprintln(os.Stderr, "redlatch:", message(err)) // the lock is free when its lease is over
	}
	return exitOf(result.State)
}

// connect returns the clients of the servers. The wait for the lock includes that for the servers.
func (l *lockCommand) connect(ctx context.Context) ([]*redlatch.Client, error) {
	const pause = 200 * time.Millisecond
	began := time.Now()
	said := false
	for {
		clients, err := l.open(ctx)
		left := l.wait - time.Since(began)
		if err == nil {
			if l.wait > 0 {
				l.wait = max(left, time.Millisecond)
			}
			return clients, nil
		}
		if !errors.Is(err, lock.ErrUnavailable) || isWrongPassword(err) || l.try || l.wait > 0 && left < pause {
			return nil, err
		}

		if !said && time.Since(began) >= time.Second {
			said = true
			fmt.Fprintln(os.Stderr, "redlatch: waiting for the server:", message(err))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// isWrongPassword reports whether the server has refused the password.
func isWrongPassword(err error) bool {
	var reply *rueidis.RedisError
	return errors.As(err, &reply) && (strings.HasPrefix(reply.Error(), "WRONGPASS") || strings.HasPrefix(reply.Error(), "NOAUTH"))
}

// open returns the clients of the servers: with --red of those that can be reached, if they are a majority.
func (l *lockCommand) open(ctx context.Context) ([]*redlatch.Client, error) {
	urls := l.red
	if len(urls) == 0 {
		urls = []string{l.connection.address()}
	}
	clients, errs := make([]*redlatch.Client, len(urls)), make([]error, len(urls))
	var wg sync.WaitGroup
	for i, url := range urls {
		wg.Go(func() { clients[i], errs[i] = l.connection.open(ctx, url, redlatch.WithWatchdogTimeout(l.ttl)) })
	}
	wg.Wait()
	clients = slices.DeleteFunc(clients, func(c *redlatch.Client) bool { return c == nil })
	for _, err := range errs {
		if err != nil && (len(clients) <= len(urls)/2 || errors.Is(err, lock.ErrInvalid)) {
			closeAll(clients)
			return nil, err
		}
	}
	return clients, nil
}

// closeAll closes the clients after the releases that go on in the background, such as those of the
// votes that a Redlock did not wait for.
func closeAll(clients []*redlatch.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, client := range clients {
		_ = client.Shutdown(ctx)
	}
}

// held is what a command runs under: a lock or a permit.
type held interface {
	supervise.Lease
	// environment returns the variables that the command gets.
	environment() []string
	// keepUntil has release leave the lock held until then.
	keepUntil(t time.Time)
	release() error
}

func (l *lockCommand) acquire(ctx context.Context, clients []*redlatch.Client, names []string) (held, error) {
	if l.permits > 0 {
		permit, err := clients[0].PermitSemaphore(names[0], semaphore.Permits(l.permits)).Acquire(ctx, 1, l.options()...)
		return heldPermit{permit}, err
	}
	h, err := l.locker(clients, names).Lock(ctx, l.options()...)
	return heldLock{h}, err
}

// locker returns the lock of those names.
func (l *lockCommand) locker(clients []*redlatch.Client, names []string) lock.Locker {
	var all []lock.Locker
	for _, name := range names {
		var votes []lock.Locker
		for _, client := range clients {
			votes = append(votes, l.one(client, name))
		}
		if len(l.red) > 0 {
			all = append(all, clients[0].RedLock(votes, multilock.Absent(len(l.red)-len(clients))))
		} else {
			all = append(all, votes...)
		}
	}
	if len(all) == 1 {
		return all[0]
	}
	return clients[0].MultiLock(all...)
}

func (l *lockCommand) one(client *redlatch.Client, name string) lock.Locker {
	switch l.kind {
	case "fair":
		return client.FairLock(name)
	case "read":
		return client.RWLock(name).Read()
	case "write":
		return client.RWLock(name).Write()
	case "fenced":
		return client.FencedLock(name)
	case "plain":
		return client.PlainLock(name)
	case "spin":
		return client.SpinLock(name)
	default:
		return client.Lock(name)
	}
}

type heldLock struct{ lock.Hold }

func (h heldLock) environment() []string {
	if token := h.Token(); token > 0 {
		return []string{"REDLATCH_TOKEN=" + strconv.FormatInt(token, 10)}
	}
	return nil
}

func (h heldLock) keepUntil(t time.Time) { engine.KeepUntil(h.Hold, t) }

func (h heldLock) release() error { return h.Unlock(context.Background()) }

type heldPermit struct{ *semaphore.Permit }

func (p heldPermit) environment() []string { return []string{"REDLATCH_PERMIT=" + p.ID()} }
func (p heldPermit) keepUntil(time.Time)   {} // --at-least is not for permits
func (p heldPermit) release() error        { return p.Release(context.Background()) }
