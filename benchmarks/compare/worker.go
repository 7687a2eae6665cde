package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
)

// job runs a prepared task.
type job func() (*outcome, error)

// jobs prepare a task, by its Do.
var jobs = map[string]func(ctx context.Context, t task, s service) (job, error){
	"repeat": repeat,
	"signal": signals,
	"order":  order,
	"latch":  latches,
	"hold":   hold,
	"wait":   wait,
	"start":  starts,
}

// work runs a task. It reads the task as a line, prepares it, prints "ready", starts on the
// next line, and prints the outcome.
func work(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	if !lines.Scan() {
		return io.ErrUnexpectedEOF
	}
	var t task
	if err := json.Unmarshal(lines.Bytes(), &t); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := open(ctx, t)
	if err != nil {
		return err
	}
	prepare, ok := jobs[t.Do]
	if !ok {
		return fmt.Errorf("unknown job %q", t.Do)
	}
	do, err := prepare(ctx, t, s)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "ready")
	if !lines.Scan() {
		return io.ErrUnexpectedEOF
	}
	o, err := do()
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(o); err != nil {
		return err
	}
	if t.Do != "hold" && t.Do != "wait" { // closing many locks takes time
		s.close()
	}
	return nil
}
