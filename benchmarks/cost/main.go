// Command cost measures what locks cost while nothing happens to them: the
// memory of the process that holds them or waits for them, and the processor
// time that it and the server spend on keeping them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// window is for how long processor time is counted: two rounds of renewals and
// a bit.
const window = 2*redlatch.DefaultWatchdogTimeout/3 + time.Second

func main() {
	run := table
	if len(os.Args) > 1 {
		run = func() error { return row(os.Args[1], os.Args[2], os.Args[3]) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// table runs a process for each row, so that none sees what another has left.
func table() error {
	server, err := redlatchtest.Start()
	if err != nil {
		return err
	}
	defer server.Close()
	fmt.Printf("%s, %s, %d processors, watchdog timeout %v\n\n",
		server.Kind(), runtime.Version(), runtime.NumCPU(), redlatch.DefaultWatchdogTimeout)
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(out, "\theap each\tstacks each\tresident each\tprocessor, client\tprocessor, server\t")
	for _, r := range [][2]string{
		{"held", "0"}, {"held", "1000"}, {"held", "10000"}, {"held", "100000"},
		{"waiting for one", "10000"}, {"waiting for as many", "10000"},
	} {
		cmd := exec.Command(os.Args[0], r[0], r[1], server.URL())
		cmd.Stderr = os.Stderr
		line, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%s %s: %w", r[1], r[0], err)
		}
		fmt.Fprintf(out, "%s %s\t%s\t\n", r[1], r[0], line)
	}
	return out.Flush()
}

// row prints the cells of a row: what n locks cost that are held here, or held
// by another client and waited for.
func row(what, number, url string) error {
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	opt, err := redlatch.ParseURL(url)
	if err != nil {
		return err
	}
	opt.DisableCache = true
	conn, err := rueidis.NewClient(opt)
	if err != nil {
		return err
	}
	defer conn.Close()
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.Lock("first").Do(ctx, func(context.Context) error { return nil }); err != nil {
		return err
	}

	holds := make([]lock.Hold, n) // the caller's: not counted
	if what == "waiting for one" {
		holds = holds[:1]
	}
	holder, opts := client, []lock.Option(nil)
	var before memory
	if what != "held" {
		if holder, err = redlatch.Open(ctx, url); err != nil {
			return err
		}
		defer holder.Close()
		opts = append(opts, lock.Lease(time.Hour))
	} else if before, err = remember(); err != nil {
		return err
	}
	err = each(len(holds), func(i int) (err error) {
		holds[i], err = holder.Lock("lock "+strconv.Itoa(i)).Lock(ctx, opts...)
		return err
	})
	if err != nil {
		return err
	}
	var waiters sync.WaitGroup
	if what != "held" {
		if before, err = remember(); err != nil {
			return err
		}
		for i := range n {
			l := client.Lock(holds[i%len(holds)].Name())
			waiters.Go(func() { _, _ = l.Lock(ctx) })
		}
		for client.PubSub().Subscribed < len(holds) {
			time.Sleep(10 * time.Millisecond)
		}
	}
	after, err := remember()
	if err != nil {
		return err
	}
	begin := time.Now()
	client1, server1, err := processor(ctx, conn)
	if err != nil {
		return err
	}
	time.Sleep(window)
	client2, server2, err := processor(ctx, conn)
	if err != nil {
		return err
	}
	passed := time.Since(begin)
	perLock := func(bytes int64) string {
		if n == 0 {
			return "-"
		}
		return strconv.FormatInt(bytes/int64(n), 10) + " B"
	}
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %%", 100*d.Seconds()/passed.Seconds()) }
	fmt.Print(strings.Join([]string{
		perLock(after.heap - before.heap), perLock(after.stacks - before.stacks), perLock(after.resident - before.resident),
		share(client2 - client1), share(server2 - server1),
	}, "\t"))

	cancel()
	waiters.Wait()
	return each(len(holds), func(i int) error { return holds[i].Unlock(context.Background()) })
}

// each calls f for 0 to n-1, many at a time.
func each(n int, f func(i int) error) error {
	var errs [64]error
	var wg sync.WaitGroup
	for g := range errs {
		wg.Go(func() {
			for i := g; i < n && errs[g] == nil; i += len(errs) {
				errs[g] = f(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// memory is what this process uses.
type memory struct{ heap, stacks, resident int64 }

func remember() (memory, error) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return memory{}, err
	}
	pages, err := strconv.ParseInt(strings.Fields(string(statm))[1], 10, 64)
	return memory{int64(m.HeapAlloc), int64(m.StackInuse), pages * int64(os.Getpagesize())}, err
}

// processor returns the processor time that this process and the server have
// used so far.
func processor(ctx context.Context, conn rueidis.Client) (client, server time.Duration, err error) {
	info, err := conn.Do(ctx, conn.B().Info().Section("cpu").Build()).ToString()
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, 0, err
			}
			server += time.Duration(seconds * float64(time.Second))
		}
	}
	var r syscall.Rusage
	err = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano()), server, err
}
