package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

const module = "github.com/redlatch/redlatch"

// everywhere are the packages whose tests cover all kinds and the client.
var everywhere = []string{"internal/contract", "internal/system"}

// kindPackages are the packages of the kinds: they show the effects of internal packages.
var kindPackages = []string{"rlock", "fairlock", "grouplock", "rwlock", "semaphore", "countdown", "multilock", "internal/hub"}

// candidates returns the packages whose tests may detect a mutant of dir, the closest first.
// depends reports whether the tests of a package use dir; hasTests whether it has any.
func candidates(dir string, lua bool, depends func(pkg, dir string) bool, hasTests func(pkg string) bool) (pkgs []string) {
	all := append([]string{dir}, everywhere...)
	if lua && dir != "." && !strings.HasPrefix(dir, "internal/") {
		all = []string{dir, everywhere[0]}
	}
	if strings.HasPrefix(dir, "internal/") {
		all = append(all, kindPackages...)
	}
	for _, pkg := range all {
		if !slices.Contains(pkgs, pkg) && hasTests(pkg) && (pkg == dir || depends(pkg, dir)) {
			pkgs = append(pkgs, pkg)
		}
	}
	return pkgs
}

// uses returns the packages of the module that the tests of a package use.
func (t *tree) uses(ctx context.Context, pkg string) (map[string]bool, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-deps", "-test", "./"+pkg)
	cmd.Dir = t.root
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w", pkg, err)
	}
	used := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ") // after it: the test for which it is built
		if name == module {
			used["."] = true
		} else if dir, ours := strings.CutPrefix(name, module+"/"); ours {
			used[dir] = true
		}
	}
	return used, nil
}

// A finding is the result of the tests of a package.
type finding struct {
	failed bool
	by     string // the first test that failed, or another description
	took   time.Duration
}

// test runs the tests of a package until one fails, or until the time limit, which is a
// failure too.
func (t *tree) test(ctx context.Context, pkg string, parallel int, limit time.Duration) (finding, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit+time.Minute) // includes compilation
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "test", "-json", "-short", "-failfast", "-count=1", "-vet=off",
		fmt.Sprint("-parallel=", parallel), fmt.Sprint("-timeout=", limit), "./"+pkg)
	cmd.Dir = t.root
	cmd.Env = append(os.Environ(), "TMPDIR="+t.tmp)
	// Servers and processes of tests are killed as well.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	killAll := func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Cancel = killAll
	cmd.WaitDelay = 5 * time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return finding{}, err
	}
	if err := cmd.Start(); err != nil {
		return finding{}, err
	}
	by, ended := firstFailure(out)
	_ = killAll()
	err = cmd.Wait()
	_ = os.RemoveAll(t.tmp)
	if err := os.MkdirAll(t.tmp, 0o755); err != nil {
		return finding{}, err
	}
	took := time.Since(began)
	switch {
	case by != "":
		return finding{true, path.Join(pkg, by), took}, nil
	case ctx.Err() == context.DeadlineExceeded:
		return finding{true, path.Join(pkg, "timeout"), took}, nil
	case ctx.Err() != nil:
		return finding{}, ctx.Err()
	case !ended:
		return finding{}, fmt.Errorf("go test ./%s: %w: %s", pkg, err, stderr.Bytes())
	}
	return finding{took: took}, nil
}

// firstFailure reads the output of "go test -json" up to the first failure and returns the
// failed test or a description. ended reports whether the output was complete or a failure was
// found.
func firstFailure(out io.Reader) (by string, ended bool) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &event) != nil {
			continue
		}
		switch {
		case strings.HasPrefix(event.Output, "panic: test timed out"):
			return "timeout", true
		case strings.HasPrefix(event.Output, "panic: "), strings.HasPrefix(event.Output, "fatal error: "),
			strings.HasPrefix(event.Output, "WARNING: DATA RACE"):
			by = strings.TrimSpace(event.Output)
			if event.Test != "" {
				by = event.Test + ": " + by
			}
			return by, true
		case event.Action == "build-fail":
			return "build failed", true
		case event.Action == "fail" && event.Test != "":
			return event.Test, true
		case event.Action == "fail":
			return "the package", true // such as leaked goroutines
		case event.Action == "pass" && event.Test == "", event.Action == "skip" && event.Test == "":
			return "", true
		}
	}
	return "", false
}
