// Command redlatch runs other commands under distributed locks on Redis and Valkey, and shows, explains and
// changes locks. See redlatch --help.
package main

import (
	"os"
	"runtime"

	"github.com/spf13/cobra"
)

// The main goroutine starts the commands, which die with its thread: see supervise.Run.
func init() { runtime.LockOSThread() }

func main() {
	os.Exit(run(os.Args[1:]))
}

// run runs the program and returns its exit status.
func run(args []string) int {
	root := newRoot()
	root.SetArgs(args)
	return statusOf(root, root.Execute())
}

func newRoot() *cobra.Command {
	c := &connection{}
	root := &cobra.Command{
		Use:   "redlatch",
		Short: "Distributed locks on Redis and Valkey",
		Long: `Run commands under distributed locks on Redis and Valkey, and inspect, measure and repair locks,
semaphores and latches.

The locks are those of the Go library redlatch and of Java's Redisson.`,
		Example: `  redlatch lock --wait 1m backup -- pg_dump -f /backups/app.sql app
  redlatch inspect backup

  # Complete commands and flags in this shell.
  eval "$(redlatch completion bash)"`,
		Version:       readBuild().Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&c.url, "url", "",
		"URL of the server (default: $REDLATCH_URL, $REDIS_URL, or "+localhost+")")
	root.PersistentFlags().StringVar(&c.prefix, "prefix", "", "prefix of all keys: a name is the key without it")
	root.AddCommand(newLock(c), newRate(c), newInspect(c), newList(c), newDoctor(c), newTop(c))
	root.AddCommand(newUnlock(c), newPermits(c), newLatch(c), newOnce(c), newToken(c))
	root.AddCommand(newProbe(c), newVerify(c), newBench(c), newVersion(), newMan())
	return root
}
