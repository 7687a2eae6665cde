// Command compare measures redlatch and other locking libraries in one run and writes a
// report. See scenario.go for the measurements and worker.go for the method.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	workIfAsked()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// workIfAsked runs a task and exits if the program was started as a worker.
func workIfAsked() {
	if len(os.Args) != 2 || os.Args[1] != "work" {
		return
	}
	if err := work(os.Stdin, os.Stdout); err != nil {
		fmt.Println(failedPrefix + firstLine(err.Error()))
		os.Exit(1)
	}
	os.Exit(0)
}

func run() error {
	dir := flag.String("dir", "report", "directory of the report")
	from := flag.String("from", "", "rewrite the report from this file of figures instead of measuring")
	only := flag.String("only", "", "numbers of the scenarios to measure, separated by commas; prints the report; all if empty")
	named := flag.String("peers", "", "a regular expression for the names of the peers to measure; prints the report; all if empty")
	long := flag.Bool("long", false, "measure for longer and more often")
	flag.Parse()
	if *from != "" {
		r, err := read(*from)
		if err != nil {
			return err
		}
		return r.writeReport(*dir)
	}
	p := plan{window: 500 * time.Millisecond, repetitions: 3, pulse: 500 * time.Millisecond, progress: os.Stderr}
	if *long {
		p.window, p.repetitions, p.pulse = 3*time.Second, 7, 2*time.Second
	}
	p.scenarios = scenarios(p.window)
	if *only != "" {
		p.scenarios = slices.DeleteFunc(p.scenarios, func(s scenario) bool {
			return !slices.Contains(strings.Split(*only, ","), strconv.Itoa(s.number))
		})
	}
	if *named != "" {
		expression, err := regexp.Compile(*named)
		if err != nil {
			return err
		}
		p.scenarios = ofPeers(p.scenarios, expression.MatchString)
	}
	r, err := compare(p)
	if err != nil {
		return err
	}
	if *only+*named != "" {
		fmt.Print(r.text(nil))
		return nil
	}
	return errors.Join(r.writeReport(*dir), r.write(filepath.Join(*dir, figuresFile)))
}

// ofPeers returns what there is to measure for some peers.
func ofPeers(all []scenario, ask func(peer string) bool) []scenario {
	for i := range all {
		for j := range all[i].cells {
			c := &all[i].cells[j]
			c.peers = slices.DeleteFunc(slices.Clone(c.peers), func(peer string) bool { return !ask(peer) })
		}
		all[i].cells = slices.DeleteFunc(all[i].cells, func(c cell) bool { return len(c.peers) == 0 })
	}
	return slices.DeleteFunc(all, func(s scenario) bool { return len(s.cells) == 0 })
}
