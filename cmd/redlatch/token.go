package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/wire"
)

func newToken(c *connection) *cobra.Command {
	raise := &cobra.Command{
		Use:   "raise NAME N",
		Short: "Let the next fencing token be greater than N",
		Long: `Raise the counter of the fenced lock NAME to N, the greatest token that a database or another
resource remembers, so that the next token is greater. A counter that is N or more stays unchanged,
so the command can be repeated.

The lock may be held: its holder keeps its token. A process that passes the lock on among its own
callers may have drawn their tokens before, and uses them for some milliseconds.

The output is the counter, which is the last token. redlatch inspect shows it too.

` + statusHelpOf("the counter is N or more", ""),
		Example: `  redlatch token raise account:7 184467

  # Several names: each line of the input has the name and the token.
  psql -AtF ' ' -c "SELECT 'account:' || id, token FROM accounts WHERE token > 0" app |
    while read -r name token; do
      redlatch token raise -- "$name" "$token" || break
    done`,
		Args:              arguments(2, 2),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			name := args[0]
			floor, err := number[int64](args[1], 0, wire.MaxToken-1)
			if err != nil {
				return err
			}
			return c.do(func(ctx context.Context, client *redlatch.Client) error {
				// Without its counter a fenced lock is an ordinary lock, or nothing.
				if err := c.checkObject(ctx, name, "fenced lock", inspect.Fenced, inspect.Lock); err != nil {
					return err
				}
				last, err := client.FencedLock(name).RaiseTokens(ctx, floor)
				if err != nil {
					return c.nameDenied(ctx, err, inspect.Fenced, name)
				}
				return printLine(last)
			})
		},
	}
	return group(&cobra.Command{
		Use:   "token",
		Short: "Raise the fencing tokens of a lock",
		Long: `Raise the fencing tokens of a lock, after the server has lost its data or failed over to a replica
without the last tokens. The tokens would otherwise begin again, and a resource that remembers greater
ones would reject every holder.

The command refuses a name that is no fenced lock. It trusts a number without other keys, and a lock
or nothing, which may be a fenced lock without its counter.`,
		Example: `  redlatch inspect account:7
  redlatch token raise account:7 184467`,
	}, raise)
}
