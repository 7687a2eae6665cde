package main

import "time"

// task is what a process does for a measurement. Every peer is measured in processes
// of its own, so that one does not leave another its garbage.
type task struct {
	Peer  string   `json:"peer"`
	Addrs []string `json:"addrs"`
	// Do names one of the jobs. See there what it does with the rest.
	Do string `json:"do"`
	// Kind is that of the object: lock, fair, rw, semaphore or red.
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	Process    int    `json:"process"` // its number, from 0
	Own        bool   `json:"own"`     // each goroutine has an object of its own
	Goroutines int    `json:"goroutines"`
	Writes     int    `json:"writes"`  // of 100 operations on a read-write lock
	Permits    int    `json:"permits"` // of a semaphore
	// Hold is for how long a lock is held, and Rest what passes between a release and
	// the next acquisition.
	Hold time.Duration `json:"hold"`
	Rest time.Duration `json:"rest"`
	For  time.Duration `json:"for"`
	// Patience is how long the preparation may take, beyond what is usual.
	Patience time.Duration `json:"patience"`
	// Trace has the moments of each acquisition and release recorded.
	Trace bool `json:"trace"`
}

// outcome is what came of a task. What a job does not measure is zero.
type outcome struct {
	Elapsed time.Duration `json:"elapsed"`
	// Latency is of acquisition and release together.
	Latency histogram `json:"latency"`
	Shares  []int     `json:"shares"` // operations of each goroutine
	Allocs  uint64    `json:"allocs"`
	Bytes   uint64    `json:"bytes"`
	Failed  int       `json:"failed"`
	Failure string    `json:"failure"` // the first
	// Got and Gave are when a goroutine had the lock and when it began to give it
	// back, by the monotonic clock that all processes of the machine share.
	Got  []int64 `json:"got"`
	Gave []int64 `json:"gave"`
	// Wake is from what wakes a waiter to its return, and Last that of the last waiter
	// where many are woken together.
	Wake histogram `json:"wake"`
	Last histogram `json:"last"`
	// Heap, Stacks and Resident are bytes for each goroutine or lock.
	Heap     float64 `json:"heap"`
	Stacks   float64 `json:"stacks"`
	Resident float64 `json:"resident"`
	// CPU is the processor time of the process.
	CPU time.Duration `json:"cpu"`
	// Overtook is how many had the lock before one that had queued earlier, and Queued
	// how many there were.
	Overtook int `json:"overtook"`
	Queued   int `json:"queued"`
	// Spent says that the worker does not go on to another task.
	Spent bool `json:"spent"`
}

func (o *outcome) ops() (n int) {
	for _, share := range o.Shares {
		n += share
	}
	return n
}

func (o *outcome) fail(err error) {
	o.Failed++
	if o.Failure == "" {
		o.Failure = err.Error()
	}
}
