// Quickstart shows redlatch with real processes: several of them increment a counter in a
// file, each while it holds a lock, and one is killed while it holds the lock. The final
// count is exact.
//
//	go run ./examples/quickstart
//
// It uses the server at -url, or at REDIS_URL. Without one it starts redis-server or
// valkey-server if installed, and an embedded server if not.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/redlatchtest"
)

const (
	// watchdogTimeout bounds how long the lock of a dead process stays. It is short, so that
	// the program ends soon.
	watchdogTimeout = 2 * time.Second
	workTime        = 60 * time.Millisecond
	restTime        = 30 * time.Millisecond
)

func main() {
	worker := flag.String("worker", "", "internal: run as the worker of that name")
	url := flag.String("url", os.Getenv("REDIS_URL"), "address of the server; empty: start one")
	name := flag.String("lock", "", "internal: lock of the worker")
	file := flag.String("file", "", "internal: counter of the worker")
	processes := flag.Int("processes", 4, "number of processes")
	rounds := flag.Int("rounds", 5, "number of increments of each")
	flag.Parse()
	// The program reports trouble itself, in other words.
	slog.SetDefault(slog.New(slog.DiscardHandler))

	err := error(nil)
	if *worker != "" {
		err = work(*worker, *url, *name, *file, *rounds)
	} else {
		err = run(*url, *processes, *rounds)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// work is a worker process: it increments the counter under the lock.
func work(me, url, name, file string, rounds int) error {
	ctx := context.Background()
	client, err := redlatch.Open(ctx, url, redlatch.WithWatchdogTimeout(watchdogTimeout))
	if err != nil {
		return err
	}
	defer client.Close()
	lock := client.FencedLock(name)
	for range rounds {
		asked := time.Now()
		h, err := lock.Lock(ctx)
		if err != nil {
			return err
		}
		tell("got", h.Token(), time.Since(asked).Milliseconds())
		count, err := read(file)
		if err != nil {
			return err
		}
		time.Sleep(workTime) // another process would read the same count now
		if err := h.Context().Err(); err != nil {
			return context.Cause(h.Context())
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(count+1)), 0o600); err != nil {
			return err
		}
		tell("put", count+1)
		if err := h.Unlock(ctx); err != nil {
			return err
		}
		time.Sleep(restTime) // other work, without the lock
	}
	return nil
}

// tell reports to the parent process.
func tell(words ...any) { fmt.Println(words...) }

func read(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

func run(url string, processes, rounds int) error {
	if processes < 2 || rounds < 1 {
		return errors.New("needs two processes or more, and a round or more")
	}
	kind := "the given server"
	if url == "" {
		server, err := redlatchtest.Start()
		if err != nil {
			return err
		}
		defer server.Close()
		url, kind = server.URL(), "a "+server.Kind()+" of our own"
		if strings.HasPrefix(server.Kind(), "embedded") {
			kind = "an " + server.Kind() + " (no redis-server or valkey-server is installed)"
		}
	}
	ctx := context.Background()
	client, err := redlatch.Open(ctx, url) // fails here if the server does not respond
	if err != nil {
		return err
	}
	defer client.Close()
	dir, err := os.MkdirTemp("", "redlatch-quickstart-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s := &stage{
		url: url, lock: "quickstart:" + filepath.Base(dir), file: filepath.Join(dir, "counter"),
		rounds: rounds, begin: time.Now(), results: make(chan error, processes),
	}
	defer client.FencedLock(s.lock).ResetTokens(ctx) // the name is not used again
	if err := os.WriteFile(s.file, []byte("0"), 0o600); err != nil {
		return err
	}
	fmt.Printf("%d processes increment one counter file, %d times each, on %s.\n", processes, rounds, kind)
	fmt.Printf("The first one is killed during its second increment, while it holds the lock.\n\n")
	fmt.Printf("    time  process  token\n")

	for i := range processes {
		if err := s.start(string(rune('A'+i%26)), i == 0); err != nil {
			return err
		}
	}
	var errs []error
	for range processes {
		errs = append(errs, <-s.results)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	count, err := read(s.file)
	if err != nil {
		return err
	}
	want := (processes-1)*rounds + 1
	fmt.Printf("\nThe counter stands at %d. %d processes made %d increments each, and the killed one 1: %d.\n",
		count, processes-1, rounds, want)
	if count != want {
		return errors.New("the count is wrong")
	}
	fmt.Printf("Exact. The tokens only ever grew, and the lock of the dead process was free again %v after the kill.\n",
		s.recovery.Round(10*time.Millisecond))
	return nil
}

// stage is the view of the parent process.
type stage struct {
	url, lock, file string
	rounds          int
	begin           time.Time
	results         chan error

	mu       sync.Mutex
	killed   time.Time
	recovery time.Duration
}

// start runs a worker and follows its output. A victim is killed during its second increment.
func (s *stage) start(name string, victim bool) error {
	cmd := exec.Command(os.Args[0], "-worker", name, "-url", s.url, "-lock", s.lock,
		"-file", s.file, "-rounds", strconv.Itoa(s.rounds))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		starts, dead := 0, false
		for lines := bufio.NewScanner(out); lines.Scan(); {
			words := strings.Fields(lines.Text())
			if len(words) == 0 || dead {
				continue
			}
			starts += s.show(name, words)
			if victim && starts == 2 {
				dead = true
				_ = cmd.Process.Kill()
				s.line(name, "", "killed during its increment")
				s.mu.Lock()
				s.killed = time.Now()
				s.mu.Unlock()
			}
		}
		err := cmd.Wait()
		if dead {
			err = nil
		}
		if err != nil {
			err = fmt.Errorf("process %s: %w", name, err)
		}
		s.results <- err
	}()
	return nil
}

// show prints a line of a worker. It returns 1 for the start of an increment.
func (s *stage) show(name string, words []string) int {
	switch {
	case words[0] == "got" && len(words) == 3:
		s.mu.Lock()
		note := ""
		if !s.killed.IsZero() && s.recovery == 0 {
			s.recovery = time.Since(s.killed)
			note = "   <- the lease of the dead process expired"
		}
		s.mu.Unlock()
		s.line(name, words[1], fmt.Sprintf("holds the lock after waiting %s ms%s", words[2], note))
		return 1
	case words[0] == "put" && len(words) == 2:
		s.line(name, "", "counter is now "+words[1])
	}
	return 0
}

func (s *stage) line(process, token, text string) {
	fmt.Printf("%6d ms    %s    %5s    %s\n", time.Since(s.begin).Milliseconds(), process, token, text)
}
