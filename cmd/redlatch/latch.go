package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// latchCommand is "redlatch latch".
type latchCommand struct {
	connection *connection

	wait, ttl time.Duration
}

func newLatch(c *connection) *cobra.Command {
	l := &latchCommand{connection: c}
	set := &cobra.Command{
		Use:   "set NAME N",
		Short: "Set the count of a latch",
		Long: `Set the count of the latch NAME to N, so that the latch is shut until N processes have counted
down. A count that is not zero stays unchanged.

The output repeats the number.

` + statusHelpOf("the count is N", "the latch has a count already"),
		Example: `  redlatch latch set import:42 3

  # Open it after an hour, whatever is left of the count.
  redlatch latch set --ttl 1h import:42 3`,
		Args: arguments(2, 2),
		RunE: l.set,
	}
	set.Flags().DurationVar(&l.ttl, "ttl", 0, "time after which the server deletes the count (default: never)")
	down := &cobra.Command{
		Use:   "down NAME [N]",
		Short: "Count down",
		Long: `Reduce the count of the latch NAME by N, by default 1. At zero the latch opens.

The output is what is left of the count, 0 if the latch is open now or was before.

` + statusHelpOf("counted, or the latch was open", ""),
		Example: `  redlatch latch down import:42`,
		Args:    arguments(1, 2),
		RunE:    l.down,
	}
	waitCmd := &cobra.Command{
		Use:   "wait NAME",
		Short: "Wait until a latch is open",
		Long: `Wait until the latch NAME is open. A latch without a count is open. The command prints nothing.

` + statusHelpOf("the latch is open\n  124      the latch is not open, and the wait is over", "") + `
  128 + n  signal n ended the wait`,
		Example: `  redlatch latch wait --wait 10m import:42 && ./publish`,
		Args:    arguments(1, 1),
		RunE:    l.await,
	}
	waitCmd.Flags().DurationVar(&l.wait, "wait", 0, "longest wait (default: until a signal)")
	remove := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete the count of a latch, which opens it",
		Long: `Delete the count of the latch NAME, which opens the latch. The waiters of redlatch go on at once.
Waiters of Redisson do not notice the deletion. They stay blocked until somebody sets a count again
and it is counted down to zero.

The output says whether there was a count.

` + statusHelpOf("the latch has no count, whether it had one or not", ""),
		Example: `  redlatch latch delete import:42`,
		Args:    arguments(1, 1),
		RunE:    l.remove,
	}
	all := []*cobra.Command{set, down, waitCmd, remove}
	for _, cmd := range all {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	return group(&cobra.Command{
		Use:   "latch",
		Short: "Set, count down or await a count-down latch",
		Long: `Set, count down, await or delete a count-down latch: processes wait until others have counted it
down to zero.

The commands refuse a name that is no latch. A number without other keys may be anything, for
example a latch of Redisson, a semaphore, or a counter of an application. They trust that it is a
latch.`,
		Example: `  redlatch latch set import:42 2
  redlatch latch down import:42
  redlatch latch wait --wait 10m import:42`,
	}, all...)
}

// do runs f with a latch, if name may be one.
func (l *latchCommand) do(name string, f func(ctx context.Context, latch *countdown.Latch) error) error {
	return l.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		if err := l.connection.checkObject(ctx, name, "latch", inspect.Latch); err != nil {
			return err
		}
		return l.connection.nameDenied(ctx, f(ctx, client.CountDownLatch(name)), inspect.Latch, name)
	})
}

func (l *latchCommand) set(cmd *cobra.Command, args []string) error {
	name := args[0]
	n, err := number(args[1], 1, countdown.MaxCount)
	if err != nil {
		return err
	}
	limited := cmd.Flags().Changed("ttl")
	if limited {
		if err := session.CheckLease(l.ttl); err != nil {
			return fmt.Errorf("--ttl: %w", err)
		}
	}
	return l.do(name, func(ctx context.Context, latch *countdown.Latch) (err error) {
		set := false
		if limited {
			set, err = latch.TrySetCountFor(ctx, n, l.ttl)
		} else {
			set, err = latch.TrySetCount(ctx, n)
		}
		switch {
		case err != nil:
			return err
		case !set:
			return exit{statusNo, fmt.Errorf("%s has a count already, which redlatch latch delete removes", name)}
		}
		return printLine(n)
	})
}

func (l *latchCommand) down(_ *cobra.Command, args []string) (err error) {
	name, n := args[0], 1
	if len(args) > 1 {
		if n, err = number(args[1], 1, countdown.MaxCount); err != nil {
			return err
		}
	}
	return l.do(name, func(ctx context.Context, latch *countdown.Latch) error {
		left, err := latch.CountDownN(ctx, n)
		if err != nil {
			return err
		}
		return printLine(left)
	})
}

func (l *latchCommand) await(cmd *cobra.Command, args []string) error {
	name := args[0]
	limited := cmd.Flags().Changed("wait")
	if limited && l.wait <= 0 {
		return fmt.Errorf("--wait %v: must be greater than zero", l.wait)
	}
	return l.do(name, func(ctx context.Context, latch *countdown.Latch) error {
		if limited {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, l.wait)
			defer cancel()
		}
		err := latch.Wait(ctx)
		if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lock.ErrUnavailable) {
			return exit{statusNotAcquired, fmt.Errorf("%s is not open after %v", name, l.wait)}
		}
		return err
	})
}

func (l *latchCommand) remove(_ *cobra.Command, args []string) error {
	name := args[0]
	return l.do(name, func(ctx context.Context, latch *countdown.Latch) error {
		deleted, err := latch.Delete(ctx)
		switch {
		case err != nil:
			return err
		case deleted:
			return printLine(name, "is open now")
		}
		return printLine(name, "was open")
	})
}
