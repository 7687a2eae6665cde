package engine

import "time"

const (
	// yieldFor is how long a process that yields waits for the release of another.
	yieldFor = 20 * time.Millisecond
	// A process that has yielded in vain does so again after rareYield at the earliest, and then after
	// four times as long, up to 1.6 s. That bounds the wait of a process that comes later.
	rareYield = 25 * time.Millisecond
	maxUnused = 4
	// maxVain is the most often that the pause for a third process becomes half as frequent.
	maxVain = 6
	// courtesy is how much longer a process that yields waits after the first release of
	// another, for a third that is slower to notice it, such as one of Java.
	courtesy = 2 * time.Millisecond

	// A key with pollers is left open for openFor every openEvery: that is longer than the
	// common libraries pause, and shorter than they wait. Nothing tells whether there are
	// any pollers.
	openEvery = 3 * time.Second
	openFor   = 300 * time.Millisecond
)

// yield shares a key between processes. The process that has released it would usually
// acquire it again: its goroutines run already, while the goroutines of the others have to be woken.
// So after a number of consecutive acquisitions its waiters pause until another process has
// released the key, or for yieldFor.
//
// That can be in vain: PUBLISH also counts subscribers that do not wait. Each time it was, the next
// pause comes later, until another process turns up. The pause for a third process becomes rarer in a
// similar way.
type yield struct {
	since    time.Duration // since started: the first of the acquisitions
	handOffs int32         // consecutive acquisitions in this process
	unused   uint8         // how often yielding was in vain
	active   bool
	echo     bool // the message of the own release is still to come

	releases  uint8 // of other processes that have ended yielding
	courteous bool  // another has released the key, and this process pauses for a third
	vain      uint8 // how often that was in vain
}

// started is what the times of waiters and entries count from: a time.Time is larger.
var started = time.Now()

// begin makes the process yield if it has acquired the key limit times in a row, and for long
// enough, and reports whether it does. It is called before the release is sent: its message may arrive before its
// reply.
func (y *yield) begin(limit int) bool {
	if int(y.handOffs) < limit || y.unused > 0 && time.Since(started)-y.since < rareYield<<(2*(y.unused-1)) {
		return false
	}
	y.handOffs = 0
	y.active = true
	y.echo = true
	y.courteous = false
	return true
}

// count records an acquisition in this process that follows another.
func (y *yield) count() {
	if y.handOffs == 0 {
		y.since = time.Since(started)
	}
	y.handOffs++
}

// end ends yielding. used is set if another process has acquired the key meanwhile, or since
// the first other released it.
func (y *yield) end(used bool) {
	switch {
	case !y.active:
	case y.courteous && used:
		y.vain = 0
	case y.courteous:
		y.vain = min(y.vain+1, maxVain)
	case used:
		y.unused = 0
	default:
		y.unused = min(y.unused+1, maxUnused)
	}

	y.active = false
}

// reaction is what the waiters of a process do after a message.
type reaction uint8

const (
	ignore reaction = iota
	pause           // for courtesy
	try
)

// heard returns the reaction to a message. The first message after begin is about the release
// of this process.
func (y *yield) heard() reaction {
	if !y.active {
		return try
	}
	if y.echo {
		y.echo = false
		return ignore
	}
	if !y.courteous {
		y.releases = y.releases + 1
		y.unused = 0
		if y.courteous = y.releases%(1<<y.vain) == 0; y.courteous {
			return pause
		}
	}

	y.end(true)
	return try
}

// opensLocked reports whether it is time to leave the key open to pollers that may wait beside the
// head.
func (e *entry) opensLocked() bool {
	if e.first == nil || e.first.req.LeftOpen == "" {
		return false
	}
	now := time.Since(started)
	if e.opened == 0 {
		e.opened = now - openFor
	}
	return now-e.opened >= openEvery
}

// leaveOpenLocked keeps this process from trying for a while.
func (e *entry) leaveOpenLocked() {
	e.opened = time.Since(started)
	e.yield.active = false
	if e.first != nil {
		e.lookAtLocked(started.Add(e.opened + openFor))
	}
}

// isOpenLocked reports whether the key is left open.
func (e *entry) isOpenLocked() bool { return e.opened != 0 && time.Since(started)-e.opened < openFor }
