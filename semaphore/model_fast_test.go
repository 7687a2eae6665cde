package semaphore_test

import (
	"fmt"
	"strings"
)

// timeOf returns a time as TIME does; 0 stands for none.
func timeOf(ms int64) []int64 {
	if ms == 0 {
		return []int64{0, 0}
	}
	return []int64{ms / 1000, ms%1000*1000 + 999}
}

func numbers(list []int64) string { return strings.Trim(fmt.Sprint(list), "[]") }

// ranBefore is last for an acquisition that is to be undone.
func (w *world) ranBefore(seq sequence) (reply []int64, duplicate bool) {
	reply, duplicate = w.last(seq)
	if duplicate && reply == nil {
		reply = []int64{1}
	}
	return reply, duplicate
}

// slow reports whether a script for the usual case leaves a request to the others.
func (w *world) slow(seq sequence) bool {
	_, duplicate := w.last(seq)
	left := seq.notAfter - w.now/1000*1000
	_, known := w.memory[seq.key]
	return duplicate || left < cacheTTL-2*clockError || left >= cacheTTL || !known || !w.exists
}

// revert notes that a request has not run.
func (w *world) revert(seq sequence) []int64 {
	if _, ok := w.memory[seq.key].slots[seq.slot]; !ok {
		w.note(sequence{key: seq.key, slot: seq.slot, n: seq.n - 1}, 0, -1)
	}
	return []int64{-1}
}

func (w *world) fastAcquire(seq sequence, n int64) []int64 {
	switch {
	case w.slow(seq) || len(w.queue.scores) > 0:
		return []int64{-1}
	case w.denied == "INCRBY":
		return w.revert(seq)
	case w.free < n:
		w.note(seq, w.now, 0, -1, 0)
		return []int64{0}
	}
	w.note(seq, w.now)
	w.change(-n)
	return []int64{1}
}

func (w *world) fastRelease(seq sequence, n int64) []int64 {
	switch {
	case w.slow(seq):
		return []int64{-1}
	case w.free+n > maxPermits:
		return w.revert(seq)
	}
	w.note(seq, w.now)
	w.change(n)
	return []int64{w.publish(w.free)}
}

func (w *world) fastPermitAcquire(seq sequence, p request) []int64 {
	switch {
	case w.slow(seq) || w.until != 0 || len(w.queue.scores) > 0 || w.anyExpired():
		return []int64{-1}
	case w.denied == "INCRBY" || w.free < 1:
		return w.revert(seq)
	}
	w.note(seq, w.now)
	w.change(-1)
	w.grant([]request{p})
	return []int64{1}
}

// anyExpired reports whether a permit has expired that no request has made free yet.
func (w *world) anyExpired() bool {
	for id := range w.taken.scores {
		if !w.held(id) {
			return true
		}
	}
	return false
}

func (w *world) fastPermitRelease(seq sequence, id string) []int64 {
	if w.slow(seq) || !w.held(id) {
		return []int64{-1}
	}
	w.note(seq, w.now)
	w.taken.drop(id)
	w.change(1)
	return []int64{w.publish(w.free)}
}
