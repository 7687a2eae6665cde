package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
)

// unlockCommand is "redlatch unlock".
type unlockCommand struct {
	connection *connection

	kind  string
	force bool
}

func newUnlock(c *connection) *cobra.Command {
	u := &unlockCommand{connection: c}
	cmd := &cobra.Command{
		Use:   "unlock --force NAME",
		Short: "Open a lock that another process holds",
		Long: `Open the lock NAME, whoever holds it, and wake its waiters.

The holder is not asked. If it lives, it learns of the loss when it next renews the lock: after a
third of the lease, which is 10 s by default. Until then it may work at the same time as the next
holder. If the lock is never renewed, the holder learns of the loss when the lease ends. If the
holder is dead, the lock becomes free without this command when its lease is over. So --force is
required.

redlatch tells the kind of the lock from its key. It refuses a key that is not a lock. It refuses a
string that another library may have written, unless --kind is plain. The readers of a read-write
lock are removed together. Of a slot of once-only work, unlock opens the lock of a run. It does not
forget that a slot is done: see "redlatch once forget".

The output says whether the lock was held.

` + statusHelpOf("the lock is open now, whether it was held or not", ""),
		Example: `  # Open the lock of a process that hangs.
  redlatch unlock --force backup

  # Open a lock of redsync.
  redlatch unlock --force --kind plain mutex:import`,
		Args:                  arguments(1, 1),
		ValidArgsFunction:     cobra.NoFileCompletions,
		DisableFlagsInUseLine: true,
		RunE:                  u.run,
	}
	f := cmd.Flags()
	f.BoolVar(&u.force, "force", false, "open the lock although its holder may be working")
	f.StringVar(&u.kind, "kind", "", "kind of lock: "+strings.Join(kinds, ", ")+" (default: by the key)")
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(kinds, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (u *unlockCommand) run(_ *cobra.Command, args []string) error {
	name := args[0]
	if err := checkKind(cmp.Or(u.kind, kinds[0]), kinds); err != nil {
		return err
	}
	if !u.force {
		return fmt.Errorf("the holder of %s may be working, and would work at the same time as the next one: "+
			"make sure that it does not, and repeat the command with --force", name)
	}
	return u.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		switch held, err := u.unlock(ctx, client, name); {
		case err != nil:
			return err
		case held:
			return printLine(name, "was held and is open now")
		}
		return printLine(name, "was not held")
	})
}

// unlock opens the lock and reports whether it was held.
func (u *unlockCommand) unlock(ctx context.Context, client *redlatch.Client, name string) (held bool, err error) {
	o, err := u.connection.object(ctx, name)
	if err != nil || o.Type == "" {
		return false, err
	}
	kind, err := u.kindOf(o)
	if err != nil {
		return false, err
	}
	locker, key := client, name
	if o.Slot != nil {
		// The client would put the prefix in front of the key, and not of the name of the work.
		bare := &connection{url: u.connection.url}
		if locker, err = bare.open(ctx, bare.address()); err != nil {
			return false, err
		}
		defer locker.Close()
		key = o.Key
	}
	held, err = (&lockCommand{kind: kind}).one(locker, key).(forcible).ForceUnlock(ctx)
	return held, u.connection.nameDenied(ctx, err, o.Kind, name)
}

// forcible is a lock of any kind.
type forcible interface {
	ForceUnlock(ctx context.Context) (bool, error)
}

// kindOf returns the kind of the lock. It refuses an object that is not a lock.
func (u *unlockCommand) kindOf(o inspect.Object) (string, error) {
	found, err := u.found(o)
	if err != nil || u.kind == "" {
		return found, err
	}
	if family(found) != family(u.kind) {
		return "", fmt.Errorf("%s is of kind %s, not %s", o.Name, found, u.kind)
	}
	return u.kind, nil
}

// found returns the kind of an object, if that is a lock.
func (u *unlockCommand) found(o inspect.Object) (string, error) {
	switch o.Kind {
	case inspect.RWLock:
		if isWritten(o) {
			return "write", nil
		}
		return "read", nil
	case inspect.Election:
		return "fair", nil
	case inspect.Once:
		if o.Held {
			return "lock", nil
		}
		return "", fmt.Errorf("%s is done, and not held: to let its work run again, use %s", o.Name, advice(o, "once forget"))
	case inspect.Lock, inspect.Fenced, inspect.Fair:
		return string(o.Kind), nil
	}
	maybe := o.Kind == inspect.Plain || o.Type == "string" && o.Kind == inspect.Other ||
		o.Kind == inspect.Counter && o.Expires != nil // else it is none for ForceUnlock either
	switch {
	case maybe && u.kind == "plain", o.Kind == inspect.Plain && o.Holders[0].Library != "other":
		return "plain", nil
	case o.Kind == inspect.Plain:
		return "", fmt.Errorf("%s may be a lock of another library: if it is one, add --kind plain", o.Name)
	}
	return "", fmt.Errorf("%s is not a lock, but %s", o.Name, description(o))
}

// family returns the kind of locks with the same format.
func family(kind string) string {
	switch kind {
	case "read", "write":
		return "read-write"
	case "plain":
		return kind
	}
	return "lock"
}
