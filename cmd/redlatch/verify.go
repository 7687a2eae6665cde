package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"
	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/pubsub"
)

// verifyCommand is "redlatch verify".
type verifyCommand struct {
	connection *connection

	pubSub string
	json   bool
}

// pubSubModes are the values of --pubsub.
var pubSubModes = []pubsub.Mode{pubsub.Auto, pubsub.Sharded, pubsub.Plain}

func pubSubFlags() (flags []string) {
	for _, mode := range pubSubModes {
		flags = append(flags, mode.String())
	}
	return flags
}

// statusWarning says that everything works, but not as it should.
const statusWarning = 2

func newVerify(c *connection) *cobra.Command {
	v := &verifyCommand{connection: c}
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Test whether objects of all kinds work on the server",
		Long: `Use objects of each kind on the server, with several connections of this process, and check that
they do what they promise. It takes some seconds, and 30 s at most.

The output is a table with a line for each check:

  works             as documented
  works by polling  but no message of a release comes, so a waiter notices it up to 5 s late
  does not work     for the reason in the last column
  warning           a setting or the clock of the server is a risk
  not checked       the check is impossible here, or there was no time left for it

  locks             two clients never hold one; a waiter gets it after the release, or when the lease
                    ends, and not before; its owner can re-enter it
  fair lock         also: the waiters of two clients get it in the order in which they came
  group lock        also: other values of the group are free meanwhile
  rate limiter      no permit more than the rate is acquired, and permits come back after the interval
  renewal           a lease is renewed while its holder lives
  polling           a client that cannot subscribe gets a lock nevertheless
  reconnection      holds and waits survive the loss of all connections
  hash tags         objects of all kinds in one slot of a cluster
  clock             that of each node goes as fast as that of this machine, and is less than 1 s off
  eviction          each node refuses writes when its memory is full, instead of evicting locks

verify uses random names that begin with redlatch-verify, below --prefix. It needs the rights for objects
of such names, and INFO and TIME. It deletes its keys at the end and after a signal. If that fails, it
names those that may be left. It closes its own connections to test their loss, and never those of others.

` + statusHelpOf("everything works", "something does not work") + `
  128 + n  signal n ended it`,
		Example: `  redlatch verify --url redis://app:secret@db:6379 --prefix app:

  # Only what does not work, for a program.
  redlatch verify --json | jq '.checks[] | select(.result == "fails")'`,
		Args:              arguments(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              v.run,
	}
	cmd.Long = strings.Replace(cmd.Long, "\n  125 ", "\n  2        everything works, but with warnings, by polling, or unchecked for lack of time\n  125 ", 1)
	f := cmd.Flags()
	f.StringVar(&v.pubSub, "pubsub", pubsub.Auto.String(), "kind of pub/sub: "+strings.Join(pubSubFlags(), ", "))
	f.BoolVar(&v.json, "json", false, "print JSON")
	_ = cmd.RegisterFlagCompletionFunc("pubsub", cobra.FixedCompletions(pubSubFlags(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// Results of a check, in JSON.
const (
	resultWorks     = "works"
	resultPolls     = "polls"
	resultFails     = "fails"
	resultWarning   = "warning"
	resultUnchecked = "unchecked"
)

// resultWords are the results in the table.
var resultWords = map[string]string{
	resultWorks: "works", resultPolls: "works by polling", resultFails: "does not work",
	resultWarning: "warning", resultUnchecked: "not checked",
}

// verdict is a line of the table.
type verdict struct {
	Check   string  `json:"check"`
	Result  string  `json:"result"`
	Detail  string  `json:"detail,omitempty"`
	Seconds float64 `json:"seconds"`

	late bool // the time of all checks was over before its end
}

// verification is what verify reports.
type verification struct {
	Server    string    `json:"server"`
	Topology  string    `json:"topology"`
	PubSub    string    `json:"pubsub"`
	RoundTrip float64   `json:"round_trip_ms"`
	Seconds   float64   `json:"seconds"`
	Checks    []verdict `json:"checks"`
	Left      []string  `json:"left_behind"`
}

// The limits of a run, which together are less than 30 s: Unlock and Release try for up to 5 s after
// the checks are over.
const (
	verifyTime    = 18 * time.Second
	releaseTime   = 5500 * time.Millisecond
	verifyCleanup = 3 * time.Second
)

func (v *verifyCommand) run(*cobra.Command, []string) error {
	mode := slices.Index(pubSubFlags(), v.pubSub)
	if mode < 0 {
		return fmt.Errorf("--pubsub %q: must be one of %s", v.pubSub, strings.Join(pubSubFlags(), ", "))
	}
	return interruptible(releaseTime+2*verifyCleanup, func(ctx context.Context) error {
		report, err := v.verify(ctx, pubSubModes[mode])
		if len(report.Left) > 0 {
			err = errors.Join(err, fmt.Errorf("%d keys may be left: %s", len(report.Left), strings.Join(report.Left, ", ")))
		}
		if ctx.Err() != nil {
			// The signal decides the exit status, and hides the error.
			if len(report.Left) > 0 {
				fmt.Fprintln(os.Stderr, "redlatch:", message(err))
			}
			return err
		}
		if len(report.Checks) > 0 {
			err = cmp.Or(v.print(os.Stdout, report), err)
		}
		if err != nil {
			return err
		}
		return report.exit()
	})
}

// exit returns the error for the exit status.
func (r verification) exit() error {
	status := 0
	for _, c := range r.Checks {
		switch c.Result {
		case resultFails:
			return exit{status: statusNo}
		case resultPolls, resultWarning:
			status = statusWarning
		}
		if c.late {
			status = statusWarning
		}
	}
	if status != 0 {
		return exit{status: status}
	}
	return nil
}

// verifier has what the checks share.
type verifier struct {
	connection *connection
	mode       pubsub.Mode
	scratch    string    // begins all names
	end        time.Time // of the checks
	roundTrip  time.Duration
	keys       keyring
	conn       rueidis.Client // for what is no object

	holder, other *redlatch.Client
	waiters       chan *waiter
	// deaf cannot subscribe, and renews leases early.
	deaf *redlatch.Client
	// cutLinks are the connections of cut, which a check closes.
	cut      *waiter
	cutLinks *network

	clients []*redlatch.Client
	done    sync.WaitGroup // goroutines of the checks
}

// waiter is a client that only one check at a time uses, so that its messages are those of the check.
type waiter struct {
	client *redlatch.Client
	log    *warnings
}

// verify makes all checks, and cleans up. It returns no checks if it could not begin.
func (v *verifyCommand) verify(ctx context.Context, mode pubsub.Mode) (report verification, err error) {
	began := time.Now()
	all := &verifier{
		connection: v.connection, mode: mode, scratch: "redlatch-verify-" + rand.Text(), end: began.Add(verifyTime),
	}
	// Whatever a check does, a server that it has broken must not keep it from its end.
	checking, cancel := context.WithDeadline(ctx, all.end)
	defer cancel()
	defer func() {
		cancel()
		report.Left = all.clean(context.WithoutCancel(ctx))
		report.Seconds = time.Since(began).Seconds()
	}()
	if err := all.open(checking); err != nil {
		return report, err
	}
	report.RoundTrip = all.roundTrip.Seconds() * 1e3
	report.Server, report.Topology = all.describe(checking)
	report.Checks = all.all(checking)
	report.PubSub = all.keys.pubSub()
	return report, nil
}

// within is a bound that includes round trips.
func (v *verifier) within(d time.Duration, roundTrips int) time.Duration {
	return d + time.Duration(roundTrips)*v.roundTrip
}

// open opens the clients, and measures the round trip.
func (v *verifier) open(ctx context.Context) error {
	// The first client is as a program would open it, so that its errors are those of a program.
	first, err := v.connection.open(ctx, v.connection.address(), redlatch.WithPubSubMode(v.mode))
	if err != nil {
		return err
	}
	defer first.Close()
	const pings = 5
	for i, began := 0, time.Now(); i < pings && (i < 2 || time.Since(began) < time.Second); i++ {
		sent := time.Now()
		if err := first.Ping(ctx); err != nil {
			return err
		}
		if i > 0 { // the first may include the costs of a new connection
			v.roundTrip = max(v.roundTrip, time.Since(sent))
		}
	}
	// Some services limit the connections to a few dozen, but far away two take too long.
	waiters := 2
	if v.roundTrip > 50*time.Millisecond {
		waiters = 4
	}
	v.waiters = make(chan *waiter, waiters)
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	wg.Go(func() {
		reader, err := v.connection.reader()
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			errs = append(errs, err)
			return
		}
		v.conn = reader.Conn
	})
	open := func(use func(*redlatch.Client, *network, *warnings), deaf bool, opts ...redlatch.Option) {
		wg.Go(func() {
			links, log := &network{keys: &v.keys, deaf: deaf}, &warnings{}
			client, err := v.client(ctx, links, log, opts...)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			v.clients = append(v.clients, client)
			use(client, links, log)
		})
	}
	open(func(c *redlatch.Client, _ *network, _ *warnings) { v.holder = c }, false)
	open(func(c *redlatch.Client, _ *network, _ *warnings) { v.other = c }, false)
	open(func(c *redlatch.Client, _ *network, _ *warnings) { v.deaf = c }, true, redlatch.WithWatchdogTimeout(v.renewedLease()))
	open(func(c *redlatch.Client, links *network, log *warnings) { v.cut, v.cutLinks = &waiter{c, log}, links }, false)
	for range waiters {
		open(func(c *redlatch.Client, _ *network, log *warnings) { v.waiters <- &waiter{c, log} }, false)
	}
	wg.Wait()
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}

// shortLease is a lease whose end a check awaits.
func (v *verifier) shortLease() time.Duration { return max(time.Second, 10*v.roundTrip) }

// renewedLease is a lease that a check sees renewed: the first renewal includes a new connection.
func (v *verifier) renewedLease() time.Duration { return max(1500*time.Millisecond, 20*v.roundTrip) }

func (v *verifier) client(ctx context.Context, links *network, log *warnings, opts ...redlatch.Option) (*redlatch.Client, error) {
	opt, err := v.connection.options()
	if err != nil {
		return nil, err
	}
	opt.DialCtxFn = links.dial(opt.DialCtxFn)
	opts = append(opts, v.connection.names()...)
	opts = append(opts, redlatch.WithLogger(log.logger()), redlatch.WithoutStartupChecks(), redlatch.WithPubSubMode(v.mode))
	return redlatch.New(ctx, opt, opts...)
}

// clean closes all clients, deletes the keys of the checks, and returns those that may be left.
func (v *verifier) clean(ctx context.Context) (left []string) {
	// The checks end soon after their context. If one does not, its locks expire.
	ended := make(chan struct{})
	go func() {
		v.done.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(releaseTime):
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		// A check that has failed may have left holds, for which Shutdown waits.
		closing, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for _, c := range v.clients {
			wg.Go(func() { _ = c.Shutdown(closing) })
		}
		wg.Wait()
	}()
	select {
	case <-closed:
	case <-time.After(verifyCleanup):
	}
	if v.conn == nil {
		return nil
	}
	defer v.conn.Close()
	ctx, cancel := context.WithTimeout(ctx, verifyCleanup)
	defer cancel()
	return v.keys.remove(ctx, v.conn, v.scratch)
}

// describe returns the servers and the topology, as far as the servers tell.
func (v *verifier) describe(ctx context.Context) (server, topology string) {
	var versions []string
	nodes := v.conn.Nodes()
	for _, node := range nodes {
		if info, err := infoOf(ctx, node); err == nil {
			versions = append(versions, versionOf(info))
		}
	}
	slices.Sort(versions)
	server = cmp.Or(strings.Join(slices.Compact(versions), ", "), "unknown")
	switch v.conn.Mode() {
	case rueidis.ClientModeCluster:
		if topology = fmt.Sprintf("cluster, %d nodes", len(nodes)); len(nodes) == 1 {
			topology = "cluster, 1 node"
		}
	case rueidis.ClientModeSentinel:
		topology = "sentinel"
	default:
		topology = "single server"
	}
	return server, topology
}

// infoOf returns the fields of INFO.
func infoOf(ctx context.Context, node rueidis.Client) (map[string]string, error) {
	text, err := node.Do(ctx, node.B().Info().Build()).ToString()
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

// versionOf returns the name and the version of a server.
func versionOf(info map[string]string) string {
	if version := info["valkey_version"]; version != "" {
		return "valkey " + version
	}
	if version := info["redis_version"]; version != "" {
		return cmp.Or(info["server_name"], "redis") + " " + version
	}
	return ""
}

func (v *verifyCommand) print(w io.Writer, r verification) error {
	if v.json {
		e := newEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	var text strings.Builder
	line := func(format string, cells ...any) {
		fmt.Fprintln(&text, strings.TrimRight(fmt.Sprintf(format, cells...), " "))
	}
	const head = "%-10s  %s"
	line(head, "server", printable(r.Server))
	line(head, "topology", r.Topology+", "+r.PubSub+" pub/sub")
	line(head, "round trip", fmt.Sprintf("%.2f ms", r.RoundTrip))
	line(head, "duration", fmt.Sprintf("%.1f s", r.Seconds))
	const row = "%-16s  %-16s  %s"
	line("")
	line(row, "CHECK", "RESULT", "DETAIL")
	for _, c := range r.Checks {
		line(row, c.Check, resultWords[c.Result], printable(c.Detail))
	}
	_, err := io.WriteString(w, text.String())
	return err
}
