// Workerpool limits the number of concurrent jobs of several processes by three shared
// permits. One process is killed while it works: its permits return when the lease expires,
// and the others do the rest.
package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/semaphore"
)

const (
	limit     = 3
	processes = 3
	workers   = 2  // in each process: together more than may work at once
	jobs      = 16 // of each worker
	workTime  = 50 * time.Millisecond
	// timeout is when the permits of a dead process return. It is short, so that the program
	// ends soon.
	timeout = 3 * time.Second
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	worker := flag.Bool("worker", false, "internal: run as one of the processes")
	stuck := flag.Bool("stuck", false, "internal: work until killed")
	flag.Parse()
	ctx := context.Background()
	err := error(nil)
	if *worker {
		err = process(ctx, *url, *stuck)
	} else {
		err = run(ctx, *url)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "workerpool:", err)
		os.Exit(1)
	}
}

// process is one of the processes that share the permits.
func process(ctx context.Context, url string, stuck bool) error {
	client, err := open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	pool := client.PermitSemaphore("pool", semaphore.Permits(limit))
	ended := make(chan error, workers)
	for range workers {
		go func() {
			for range jobs {
				if err := job(ctx, pool, stuck); err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
	}
	for range workers {
		err = errors.Join(err, <-ended)
	}
	return err
}

// job works while it has a permit, and prints when.
func job(ctx context.Context, pool *semaphore.PermitSemaphore, stuck bool) error {
	permit, err := pool.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	begin := time.Now()
	if stuck {
		fmt.Println("working")
		<-permit.Context().Done() // it is killed before
		return context.Cause(permit.Context())
	}
	time.Sleep(workTime)
	fmt.Println(begin.UnixNano(), time.Now().UnixNano())
	return permit.Release(ctx)
}

func open(ctx context.Context, url string) (*redlatch.Client, error) {
	return redlatch.Open(ctx, url, redlatch.WithWatchdogTimeout(timeout))
}

func run(ctx context.Context, url string) error {
	client, err := open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	pool := client.PermitSemaphore("pool", semaphore.Permits(limit))
	if err := killOne(ctx, url); err != nil {
		return err
	}
	free, err := pool.Available(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("a working process was killed: %d of %d permits are free\n", free, limit)

	lines := make(chan string)
	ended := make(chan error, processes)
	for range processes {
		go func() { ended <- start(ctx, url, func(line string) { lines <- line }) }()
	}
	var log []string
	for running := processes; running > 0; {
		select {
		case line := <-lines:
			log = append(log, line)
		case e := <-ended:
			running--
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		return err
	}
	most, err := atOnce(log)
	if err != nil {
		return err
	}
	fmt.Printf("%d jobs are done, %d at once at most\n", len(log), most)
	free, err = pool.Available(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("%d of %d permits are free again\n", free, limit)
	return nil
}

// killOne runs a process and kills it while all its workers work.
func killOne(ctx context.Context, url string) error {
	ctx, kill := context.WithCancel(ctx)
	defer kill()
	working := 0
	err := start(ctx, url, func(string) {
		if working++; working == workers {
			kill()
		}
	}, "-stuck")
	if working < workers {
		return errors.Join(errors.New("the process to be killed did not work"), err)
	}
	return nil
}

// start runs this program as one of the processes and forwards its output.
func start(ctx context.Context, url string, tell func(line string), args ...string) error {
	cmd := exec.CommandContext(ctx, os.Args[0], append(args, "-worker", "-url", url)...)
	var trouble strings.Builder
	cmd.Stderr = &trouble
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		tell(lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, trouble.String())
	}
	return nil
}

// atOnce returns the largest number of concurrent jobs.
func atOnce(log []string) (most int, err error) {
	type event struct{ at, change int64 }
	var events []event
	for _, line := range log {
		var begin, end int64
		if _, err := fmt.Sscan(line, &begin, &end); err != nil {
			return 0, err
		}
		events = append(events, event{begin, 1}, event{end, -1})
	}
	slices.SortFunc(events, func(a, b event) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.change, b.change)) })
	running := 0
	for _, e := range events {
		running += int(e.change)
		most = max(most, running)
	}
	return most, nil
}
