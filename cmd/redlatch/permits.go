package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// permitsCommand is "redlatch permits".
type permitsCommand struct {
	connection *connection

	plain, force bool
}

func newPermits(c *connection) *cobra.Command {
	p := &permitsCommand{connection: c}
	const plain = `
With --plain the semaphore is a number whose permits have no id: a Semaphore instead of a
PermitSemaphore.
`
	set := &cobra.Command{
		Use:   "set [flags] NAME N",
		Short: "Set the number of permits",
		Long: `Set the number of permits of the semaphore NAME to N, and create it if it does not exist.

N counts all permits, free and acquired. If more are acquired, none is free until enough have
been released.
` + plain + `N then counts the free permits only, because the server does not know of the others.

The output repeats the number.

A NAME with an asterisk stands for all semaphores whose names match it: * is any text, ? any
character, [a-z] one of those, and \* an asterisk. The output then has a line for each, with its
name and the number. A number without other keys, which may be a semaphore that nobody uses, counts
as one, and may also be a counter of an application. So without --force, set only lists what it
would change.

` + statusHelpOf("the semaphores have N permits", "no semaphore matches NAME"),
		Example: `  redlatch permits set downloads 4

  # Show the semaphores of all tenants, and set them.
  redlatch permits set 'tenant-*' 5
  redlatch permits set --force 'tenant-*' 5
  redlatch permits set --plain encoders 8`,
		Args: arguments(2, 2),
		RunE: p.set,
	}
	drain := &cobra.Command{
		Use:   "drain NAME",
		Short: "Let nobody acquire further permits",
		Long: `Let nobody acquire a further permit of the semaphore NAME. Acquired permits stay acquired.

The number of permits becomes 0; redlatch permits set ends this. The output is the number of
permits that are still acquired.
` + plain + `The output is then the number of permits that were free and are acquired now;
redlatch permits release returns them.

` + statusHelpOf("no permit is free", "there is no such semaphore"),
		Example: `  # Pause the downloads, and resume them.
  redlatch permits drain downloads
  redlatch permits set downloads 4

  # The same for permits without ids.
  n=$(redlatch permits drain --plain encoders) &&
    redlatch permits release --plain encoders "$n"`,
		Args: arguments(1, 1),
		RunE: p.drain,
	}
	release := &cobra.Command{
		Use:   "release NAME ID... | release --plain NAME [N]",
		Short: "Release permits that another process has acquired",
		Long: `Release the permits with these ids of the semaphore NAME, whoever has acquired them: all of them,
or none if one is not acquired. A process that uses one learns of the loss when it next renews it.
` + plain + `N of them are released, by default 1. Nothing prevents releasing more than are acquired.

The output is the number of released permits.

` + statusHelpOf("the permits are released", "a permit is not acquired or has expired, or there is no such semaphore"),
		Example: `  redlatch permits release downloads 4ad1b7c12c5b2c3b9b1c0f2d64e3a791
  redlatch permits release --plain encoders 2`,
		Args: arguments(1, math.MaxInt),
		RunE: p.release,
	}
	for _, cmd := range []*cobra.Command{set, drain, release} {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
		cmd.Flags().BoolVar(&p.plain, "plain", false, "the permits have no ids")
	}
	set.Flags().BoolVar(&p.force, "force", false, "change all semaphores that match NAME, instead of listing them")
	return group(&cobra.Command{
		Use:   "permits",
		Short: "Set, drain or release the permits of a semaphore",
		Long: `Set the number of permits of a semaphore, let nobody acquire any, or release those of other processes.

redlatch lock --permits acquires permits.

The commands refuse a name that is no semaphore. A number without other keys may be anything, for
example a semaphore of Redisson, a latch, or a counter of an application. They trust that it is a
semaphore.`,
		Example: `  redlatch permits set downloads 4
  redlatch permits drain downloads`,
	}, set, drain, release)
}

// do runs f with a client of the server, if name may be a semaphore of the right kind.
func (p *permitsCommand) do(name string, f func(ctx context.Context, client *redlatch.Client) error) error {
	return p.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		what := "semaphore"
		if p.plain {
			what = "semaphore for --plain"
		}
		if err := p.connection.checkThat(ctx, name, what, p.isOne); err != nil {
			return err
		}
		return p.connection.nameDenied(ctx, f(ctx, client), inspect.Semaphore, name)
	})
}

// isOne reports whether an object may be a semaphore of the right kind. While no permit is held, both look the same.
func (p *permitsCommand) isOne(o inspect.Object) bool {
	return o.Kind == inspect.Semaphore && !(p.plain && hasIDs(o))
}

func (p *permitsCommand) set(_ *cobra.Command, args []string) error {
	name := args[0]
	n, err := number(args[1], 0, semaphore.MaxPermits)
	if err != nil {
		return err
	}
	if strings.Contains(name, "*") {
		return p.setAll(name, n)
	}
	return p.do(name, func(ctx context.Context, client *redlatch.Client) error {
		if err := p.setOne(ctx, client, name, n); err != nil {
			return err
		}
		return printLine(n)
	})
}

func (p *permitsCommand) setOne(ctx context.Context, client *redlatch.Client, name string, n int) error {
	if p.plain {
		return client.Semaphore(name).SetPermits(ctx, n)
	}
	return client.PermitSemaphore(name).SetPermits(ctx, n)
}

// setAll sets the permits of the semaphores whose names match a pattern. Without --force it only lists them.
func (p *permitsCommand) setAll(pattern string, n int) error {
	if err := inspect.CheckPattern(pattern); err != nil {
		return err
	}
	return p.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		found, err := p.matching(ctx, pattern)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return exit{statusNo, fmt.Errorf("no semaphore matches %s", pattern)}
		}
		if !p.force {
			if err := printList(os.Stdout, found, false); err != nil {
				return err
			}
			return fmt.Errorf("%s would get %s: make sure that all of them are semaphores, and repeat the command with --force",
				count(len(found), "name"), count(n, "permit"))
		}
		for _, o := range found {
			if err := p.setOne(ctx, client, o.Name, n); err != nil {
				return p.connection.nameDenied(ctx, err, inspect.Semaphore, o.Name)
			}
			if err := printLine(o.Name, n); err != nil {
				return err
			}
		}
		return nil
	})
}

// matching returns what may be a semaphore of the right kind and matches a pattern, by name.
func (p *permitsCommand) matching(ctx context.Context, pattern string) ([]inspect.Object, error) {
	r, err := p.connection.reader()
	if err != nil {
		return nil, err
	}
	defer r.Conn.Close()
	found, err := list(ctx, r, pattern, true, func(string) bool { return true })
	return slices.DeleteFunc(found, func(o inspect.Object) bool { return o.Kind != inspect.Counter && !p.isOne(o) }), err
}

func (p *permitsCommand) drain(_ *cobra.Command, args []string) error {
	name := args[0]
	return p.do(name, func(ctx context.Context, client *redlatch.Client) error {
		// A request would create it.
		if exists, err := client.Semaphore(name).Exists(ctx); err != nil || !exists {
			return noSemaphore(name, err)
		}
		if p.plain {
			n, err := client.Semaphore(name).Drain(ctx)
			if err != nil {
				return err
			}
			return printLine(n)
		}
		s := client.PermitSemaphore(name)
		if err := s.SetPermits(ctx, 0); err != nil {
			return err
		}
		stats, err := s.Stats(ctx)
		if err != nil {
			return err
		}
		return printLine(stats.Taken)
	})
}

// noSemaphore returns err or, without one, the error of a semaphore that does not exist.
func noSemaphore(name string, err error) error {
	if err != nil {
		return err
	}
	return exit{statusNo, fmt.Errorf("there is no semaphore %s", name)}
}

var permitID = regexp.MustCompile(`^[0-9a-fA-F]{32}$`)

func (p *permitsCommand) release(_ *cobra.Command, args []string) error {
	if p.plain {
		return p.releasePlain(args)
	}
	name, ids := args[0], args[1:]
	if len(ids) == 0 {
		return errors.New("the id of a permit is missing: redlatch permits release NAME ID")
	}
	if len(ids) > semaphore.MaxBatch {
		return fmt.Errorf("%d permits: one command can release %d", len(ids), semaphore.MaxBatch)
	}
	for _, id := range ids {
		if !permitID.MatchString(id) {
			return fmt.Errorf("%q: the id of a permit has 32 hexadecimal digits", id)
		}
	}
	return p.do(name, func(ctx context.Context, client *redlatch.Client) error {
		err := client.PermitSemaphore(name).Release(ctx, ids...)
		switch {
		case errors.Is(err, lock.ErrNotHeld):
			return exit{statusNo, err}
		case err != nil:
			return err
		}
		return printLine(len(ids))
	})
}

func (p *permitsCommand) releasePlain(args []string) (err error) {
	name, n := args[0], 1
	switch len(args) {
	case 1:
	case 2:
		if n, err = number(args[1], 0, semaphore.MaxPermits); err != nil {
			return err
		}
	default:
		return errors.New("there are too many arguments: redlatch permits release --plain NAME N")
	}
	return p.do(name, func(ctx context.Context, client *redlatch.Client) error {
		if n > 0 {
			released, err := client.Semaphore(name).ReleaseIfExists(ctx, n)
			if err != nil || !released {
				return noSemaphore(name, err)
			}
		}
		return printLine(n)
	})
}
