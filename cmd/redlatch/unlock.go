package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/rueidis"
	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
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
holder. Of a lock that is never renewed, it learns at the end of the lease. If the holder is dead,
the lock becomes free without this command when its lease is over. So --force is required.

redlatch tells the kind of the lock from its key. It refuses a key that is not a lock, and a
string that another library may have written, unless --kind is plain. The readers of a read-write
lock are removed together.

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
	switch {
	case u.kind != "" && !slices.Contains(kinds, u.kind):
		return fmt.Errorf("--kind %q: must be one of %s", u.kind, strings.Join(kinds, ", "))
	case !u.force:
		return fmt.Errorf("the holder of %s may be working, and would work at the same time as the next one: "+
			"make sure that it does not, and repeat the command with --force", name)
	}
	return u.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		kind, err := u.kindOf(ctx, client, name)
		if err != nil {
			return err
		}
		held := false
		if kind != "" {
			held, err = (&lockCommand{kind: kind}).one(client, name).(forcible).ForceUnlock(ctx)
		}
		switch {
		case err != nil:
			return err
		case held:
			fmt.Println(name, "was held and is open now")
		default:
			fmt.Println(name, "was not held")
		}
		return nil
	})
}

// forcible is a lock of any kind.
type forcible interface {
	ForceUnlock(ctx context.Context) (bool, error)
}

// kindOf returns the kind of the lock, or "" if there is none. ForceUnlock deletes any hash or
// string, so kindOf refuses one that is not a lock.
func (u *unlockCommand) kindOf(ctx context.Context, client *redlatch.Client, name string) (string, error) {
	conn, err := u.connection.raw()
	if err != nil {
		return "", err
	}
	defer conn.Close()
	found, err := u.found(ctx, client, conn, name)
	if err != nil || found == "" || u.kind == "" {
		return found, err
	}
	if family(found) != family(u.kind) {
		return "", fmt.Errorf("%s is of kind %s, not %s", name, found, u.kind)
	}
	return u.kind, nil
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

// found returns the kind that the key shows.
func (u *unlockCommand) found(ctx context.Context, client *redlatch.Client, conn rueidis.Client, name string) (string, error) {
	key := u.connection.prefix + name
	typ, err := conn.Do(ctx, conn.B().Type().Key(key).Build()).ToString()
	if err != nil {
		return "", err
	}
	switch typ {
	case "none":
		return "", nil
	case "string":
		value, err := conn.Do(ctx, conn.B().Get().Key(key).Build()).ToString()
		if rueidis.IsRedisNil(err) {
			return "", nil
		}
		if _, foreign := lock.ParseOwner(value); err == nil && foreign != nil && u.kind != "plain" {
			err = fmt.Errorf("%s is a string: a lock of another library, a semaphore, a latch or something else; "+
				"if it is a lock, add --kind plain", name)
		}
		return "plain", err
	case "hash":
		return u.hashed(ctx, client, conn, name, key)
	}
	return "", fmt.Errorf("%s is not a lock: its key has a value of type %s", name, typ)
}

// hashed returns the kind of a lock that is a hash.
func (u *unlockCommand) hashed(ctx context.Context, client *redlatch.Client, conn rueidis.Client, name, key string) (string, error) {
	mode, err := conn.Do(ctx, conn.B().Hget().Key(key).Field("mode").Build()).ToString()
	if err != nil && !rueidis.IsRedisNil(err) {
		return "", err
	}
	const sample = 100 // a hash that is not a lock may be large
	fields, err := conn.Do(ctx, conn.B().Hrandfield().Key(key).Count(sample).Build()).AsStrSlice()
	if err != nil {
		return "", err
	}
	for _, field := range fields {
		_, err := lock.ParseOwner(strings.TrimSuffix(field, wire.WriteSuffix))
		if err != nil && (field != "mode" || mode != "read" && mode != "write") {
			return "", errors.New(name + " is not a lock: it is a hash with other fields")
		}
	}
	switch {
	case len(fields) == 0:
		return "", nil // it has just been released
	case mode != "":
		return mode, nil
	}
	waiters, err := client.FairLock(name).Queue(ctx)
	if len(waiters) > 0 {
		return "fair", err
	}
	return "lock", err
}
