// Command release makes a release in this repository, and pushes nothing:
//
//	go run ./scripts/release v0.1.0                  a commit on the current branch, and a tag for each module
//	go run ./scripts/release -binaries dist v0.1.0   the programs for download, from these tags
//
// RELEASING.md has the procedure around it.
//
// The go.mod file of a published module has no replace directive, because "go install" refuses a module that
// has one and all other users ignore it. During development the module's own go.work replaces the library by
// this tree. So the commit of a release only sets a version that nothing reads here: it passes the same tests
// as its parent, before and after it is published.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	dir := flags.String("binaries", "", "build the programs of a release that is tagged, into this folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("the version is missing: make release VERSION=v0.1.0")
	}
	version := flags.Arg(0)
	root, err := output(ctx, ".", nil, "git", "rev-parse", "--show-toplevel")
	if err != nil {
		return err
	}

	if *dir != "" {
		into, err := filepath.Abs(*dir)
		if err != nil {
			return err
		}
		b := binaries{root: root, version: version, dir: into}
		return b.build(ctx, platforms...)
	}
	r := release{root: root, version: version, today: time.Now()}
	if err := r.make(ctx); err != nil {
		return err
	}
	fmt.Printf("Made %s here. Look at it with git show, and then publish it as RELEASING.md says:\n\n", version)
	fmt.Printf("    git push --atomic origin HEAD:main")
	for _, m := range r.modules {
		fmt.Printf(" \\\n        %s", m.tag(version))
	}
	fmt.Printf("\n\n")
	return nil
}
