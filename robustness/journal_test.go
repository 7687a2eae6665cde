package robustness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// clock reads CLOCK_MONOTONIC in nanoseconds. All processes of a machine share this clock, and
// the deadlines of holds use it.
func clock() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// event is a line of a journal. Times are by clock.
type event struct {
	What  kind   `json:"what"`
	At    int64  `json:"at"`
	Claim string `json:"claim,omitempty"` // the acquisition; unique in a round
	Lock  string `json:"lock,omitempty"`  // the locks, separated by commas; of wiped: "" for all

	Kind  string        `json:"kind,omitempty"`  // of locking
	Wait  time.Duration `json:"wait,omitempty"`  // of locking and of asking
	Lease time.Duration `json:"lease,omitempty"` // of locking, if it is not renewed

	RTT     time.Duration `json:"rtt,omitempty"` // of locking: the round trip of a far client
	MaxHold bool          `json:"max,omitempty"` // of locking
	ID      string        `json:"id,omitempty"`  // of locking by Adopt, and of left: that of the detached hold

	Owner string `json:"owner,omitempty"` // of locking, if the owner is named
	Named bool   `json:"named,omitempty"` // of locking
	Token int64  `json:"token,omitempty"`
	Left  int    `json:"left,omitempty"` // of counted: the remaining count; of asking: the permits

	// Until is, of seen, the end of certain ownership; of others, their end.
	Until int64 `json:"until,omitempty"`
	// Lost is, of unlocked, when the loss was noticed.
	Lost int64 `json:"lost,omitempty"`

	Outcome outcome `json:"outcome,omitempty"` // of what has returned
	// Remembered is, of unlocked, whether Run has stored the success of the work.
	Remembered bool   `json:"remembered,omitempty"`
	Err        string `json:"err,omitempty"`
}

type kind string

const (
	locking   kind = "locking" // Lock or TryLock is called
	locked    kind = "locked"
	notLocked kind = "not locked"
	seen      kind = "seen"      // Remaining was positive
	queued    kind = "queued"    // Lock has a queue position on the server, or on its way to it
	over      kind = "over"      // Remaining was 0 just before Unlock
	brief     kind = "brief"     // the hold began with less time than was asked for
	late      kind = "late"      // the context ended at At, and a timer for the end of the lease fired at Until
	leaving   kind = "leaving"   // Detach is called; left or unlocked follows
	left      kind = "left"      // Detach has returned an id, in vain if the outcome is unknown
	silent    kind = "silent"    // Remaining was 0, and the context did not end
	unlocking kind = "unlocking" // Unlock is called
	unlocked  kind = "unlocked"  // it has returned, with any result
	oversized kind = "oversized" // a request for more permits than there are has returned; At is its call
	ended     kind = "ended"     // a worker, not killed
	wiped     kind = "wiped"
	disturbed kind = "disturbed" // a fault began that may change the order of waiters
	busy      kind = "busy"      // the machine was late

	counting kind = "counting" // CountDown, Count or Wait of a latch is called
	counted  kind = "counted"  // it has returned

	asking   kind = "asking"   // Acquire of a rate limiter is called
	answered kind = "answered" // it has returned
)

type outcome string

const (
	fine    outcome = "ok"
	refused outcome = "not acquired"
	expired outcome = "expired"
	gone    outcome = "gone"
	skipped outcome = "done"    // another run of the slot has succeeded
	nowhere outcome = "nowhere" // there is no detached hold with that id
	maxHold outcome = "MaxHold"
	unknown outcome = "unknown"
	failed  outcome = "failed" // the connection, the server or the client is down
	wrong   outcome = "wrong"  // an unexpected error
)

// journal is the file to which a process writes its events. Written events survive the end of
// the process.
type journal struct {
	mu sync.Mutex
	f  *os.File
}

func openJournal(path string) (*journal, error) {
	f, err := os.Create(path)
	return &journal{f: f}, err
}

func (j *journal) write(e event) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, err := j.f.Write(append(line, '\n')); err != nil {
		panic(err)
	}
}

func (j *journal) close() error { return j.f.Close() }

const journalExt = ".jsonl"

// readJournals returns the events of all journals in a directory, each in the order of
// writing.
func readJournals(dir string) ([]event, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*"+journalExt))
	if err != nil {
		return nil, err
	}
	var events []event
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(data) {
			if !bytes.HasSuffix(line, []byte("\n")) {
				break // the process was killed during a write
			}
			var e event
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			events = append(events, e)
		}
	}
	return events, nil
}
