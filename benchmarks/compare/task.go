package main

import "time"

// task is the work of a process for a measurement. Every peer runs in its own processes, so
// that one leaves no garbage to another.
type task struct {
	Peer  string   `json:"peer"`
	Addrs []string `json:"addrs"`
	// Do names the job. Each job documents how it uses the rest.
	Do string `json:"do"`
	// Kind is the kind of object: lock, fair, rw, semaphore, permit, multi, red or rate.
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	Process    int    `json:"process"` // its number, from 0
	Own        bool   `json:"own"`     // each goroutine has its own object
	Goroutines int    `json:"goroutines"`
	Writes     int    `json:"writes"`  // of 100 operations on a read-write lock
	Permits    int    `json:"permits"` // of a semaphore, or of a rate limiter in limitPer
	// Hold is how long a lock is held, and Rest the time between a release and the next
	// acquisition.
	Hold time.Duration `json:"hold"`
	Rest time.Duration `json:"rest"`
	For  time.Duration `json:"for"`
	// Patience is the additional time that the preparation may take.
	Patience time.Duration `json:"patience"`
	// Whole counts the memory of sessions and connections that a peer opens for each, and of the caller's requests.
	Whole bool `json:"whole"`
	// Background has acquisitions and releases use context.Background() instead of contexts that
	// can be canceled.
	Background bool `json:"background"`
	// Trace records the times of each acquisition and release.
	Trace bool `json:"trace"`
	// Trip is how much longer than usual a round trip to the server takes.
	Trip time.Duration `json:"trip"`
	// Overheard has a connection subscribe to everything without waiting for a lock.
	Overheard bool `json:"overheard"`
}

// outcome is the result of a task. Values that a job does not measure are zero.
type outcome struct {
	Elapsed time.Duration `json:"elapsed"`
	// Latency is of acquisition and release together.
	Latency histogram `json:"latency"`
	Shares  []int     `json:"shares"` // operations of each goroutine
	Allocs  uint64    `json:"allocs"`
	Bytes   uint64    `json:"bytes"`
	Failed  int       `json:"failed"`
	Failure string    `json:"failure"` // the first
	// Got and Gave are when a goroutine acquired the lock and when it began to release it, by
	// the monotonic clock that all processes of the machine share.
	Got  []int64 `json:"got"`
	Gave []int64 `json:"gave"`
	// Wake is the time from the wake-up of a waiter to its return, and Last that of the last
	// of many waiters.
	Wake histogram `json:"wake"`
	Last histogram `json:"last"`
	// Heap, Stacks and Resident are bytes for each goroutine or lock.
	Heap     float64 `json:"heap"`
	Stacks   float64 `json:"stacks"`
	Resident float64 `json:"resident"`
	// Goroutines is their number for each goroutine or lock.
	Goroutines float64 `json:"goroutines"`
	// CPU is the processor time of the process.
	CPU time.Duration `json:"cpu"`
	// Overtook is the number of goroutines that overtook one that had queued earlier, and
	// Queued the number of all.
	Overtook int `json:"overtook"`
	Queued   int `json:"queued"`
	// Trips is the number of round trips that follow one another.
	Trips int `json:"trips"`
	// Spent means that the worker accepts no further task.
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
