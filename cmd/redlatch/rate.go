package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// rateCommand is "redlatch rate". It waits, and fails, like "redlatch lock".
type rateCommand struct {
	lockCommand

	rate string
	take int
}

func newRate(c *connection) *cobra.Command {
	r := &rateCommand{lockCommand: lockCommand{connection: c, ttl: redlatch.DefaultWatchdogTimeout}}
	cmd := &cobra.Command{
		Use:   "rate [flags] NAME -- COMMAND [ARG...]",
		Short: "Run a command when a rate permits it",
		Long: `Wait for a permit of the rate limiter NAME, and run COMMAND in place of redlatch.

The limiter is shared by all machines, and with programs that use redlatch or Redisson. --rate creates it,
if it does not exist; an existing one keeps its rate. It expires when it has not been used for a day, or for
the duration of the rate if that is longer.

A permit comes back by itself, that duration after it was acquired, however long COMMAND runs. To limit how
many commands run at the same time, use redlatch lock --permits.

A signal that arrives during the wait ends redlatch. After that COMMAND has its process. It gets the
environment of redlatch without REDLATCH_URL and REDLATCH_RED, which may have passwords, unless --keep-url is
given. redlatch prints nothing to standard output.

Use --name for a name that begins with a dash, or that somebody else chooses.

Exit status:
  that of COMMAND, if it runs
  124      no permit was acquired: others have used the rate, and the wait is over
  125      redlatch failed, for example because the server is unreachable
  126      COMMAND cannot be run
  127      COMMAND was not found
  128 + n  signal n ended redlatch while it waited`,
		Example: `  # Ten mails per second in the whole cluster.
  redlatch rate --rate 10/1s mails -- sendmail -t

  # At most once an hour, from whichever machine: later calls do nothing.
  redlatch rate --rate 1/1h --try --quiet --conflict-status 0 alert:disk -- ./page-somebody

  # Each call costs as much as it downloads; wait for a minute at most.
  redlatch rate --rate 1000/1m --take 250 --wait 1m megabytes -- curl -O https://example.com/large.iso`,
		DisableFlagsInUseLine: true,
		RunE:                  r.run,
	}
	f := cmd.Flags()
	f.StringVar(&r.rate, "rate", "", "N/DURATION: create the limiter with N permits for each DURATION, such as 100/1m")
	f.IntVar(&r.take, "take", 1, "number of permits that COMMAND needs")
	f.DurationVar(&r.wait, "wait", 0, "longest wait for the permits and the server (default: until a signal)")
	f.BoolVar(&r.try, "try", false, "wait neither for the permits nor for the server")
	f.StringArrayVar(&r.names, "name", nil, "NAME, which may begin with a dash")
	f.IntVar(&r.conflict, "conflict-status", statusNotAcquired, "exit status if no permit was acquired")
	f.BoolVar(&r.quiet, "quiet", false, "print nothing in that case")
	f.BoolVar(&r.keepURL, "keep-url", false, "leave REDLATCH_URL and REDLATCH_RED in the environment of COMMAND")
	exclude(cmd, [2]string{"wait", "try"})
	return cmd
}

// option returns the options of the limiter.
func (r *rateCommand) option() ([]ratelimit.Option, error) {
	if r.rate == "" {
		return nil, nil
	}
	count, duration, _ := strings.Cut(r.rate, "/")
	n, err := strconv.Atoi(count)
	per, durationErr := time.ParseDuration(duration)
	if err != nil || durationErr != nil || n < 1 || n > ratelimit.MaxRate || per < time.Millisecond || per > lock.MaxLease {
		return nil, fmt.Errorf("--rate %q: must be a number and a duration, such as 100/1m", r.rate)
	}
	return []ratelimit.Option{ratelimit.Rate(n, per)}, nil
}

// isInvalid returns an error for arguments that make no sense together.
func (r *rateCommand) isInvalid(cmd *cobra.Command, names, command []string) error {
	const usage = "redlatch rate NAME -- COMMAND"
	switch {
	case len(names) == 0:
		return errors.New("the name of the rate limiter is missing: " + usage)
	case len(names) > 1:
		return errors.New("only one NAME is possible: " + usage)
	case len(command) == 0:
		return errors.New("the command is missing: " + usage)
	case r.conflict < 0 || r.conflict > 255:
		return fmt.Errorf("--conflict-status %d: must be from 0 to 255", r.conflict)
	case r.take < 1:
		return fmt.Errorf("--take %d: must be at least 1", r.take)
	case cmd.Flags().Changed("wait") && r.wait <= 0:
		return fmt.Errorf("--wait %v: must be greater than zero", r.wait)
	}
	return nil
}

func (r *rateCommand) run(cmd *cobra.Command, args []string) error {
	names, command := r.split(cmd, args)
	if err := r.isInvalid(cmd, names, command); err != nil {
		return err
	}
	option, err := r.option()
	if err != nil {
		return err
	}
	child := exec.Command(command[0], command[1:]...)
	if child.Err != nil {
		return notStarted(child.Err) // before a permit is acquired in vain
	}

	signals := notify()
	defer signal.Stop(signals)
	wait, cancel := untilSignal()
	defer cancel()
	if err := r.acquire(wait, names[0], option); err != nil {
		return r.failed(wait, signals, err, inspect.Rate, names)
	}

	signal.Stop(signals) // from now on they do what they do to the command
	select {
	case sig := <-signals:
		return exitBy(sig)
	default:
	}
	child.Env = r.environment()
	return become(child)
}

// acquire acquires the permits. The client is closed when it returns.
func (r *rateCommand) acquire(ctx context.Context, name string, option []ratelimit.Option) error {
	clients, err := r.connect(ctx)
	if err != nil {
		return err
	}
	defer closeAll(clients)

	var opts []lock.WaitOption
	if r.try {
		opts = append(opts, lock.Wait(0))
	}
	if r.wait > 0 {
		opts = append(opts, lock.Wait(r.wait))
	}
	err = clients[0].RateLimiter(name, option...).Acquire(ctx, r.take, opts...)
	if errors.Is(err, ratelimit.ErrNotFound) {
		return fmt.Errorf("there is no rate limiter %s: --rate creates it", name)
	}
	return err
}
