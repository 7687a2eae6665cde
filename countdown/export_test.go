package countdown

import "github.com/redlatch/redlatch/internal/session"

// Settled returns how many wait for the latch and have their order against the messages.
func Settled(l *Latch) int { return inStage(l, settled) }

// Fresh returns how many wait and have not seen it yet.
func Fresh(l *Latch) int { return inStage(l, fresh) + inStage(l, asked) }

func inStage(l *Latch, s stage) (n int) {
	all := session.Of[gates](l.s)
	all.mu.Lock()
	defer all.mu.Unlock()
	if d := all.open[l.key]; d != nil {
		d.each(s, func(*waiter) { n++ })
	}
	return n
}

// Gates returns how many latches of the client somebody waits for.
func Gates(l *Latch) int {
	all := session.Of[gates](l.s)
	all.mu.Lock()
	defer all.mu.Unlock()
	return len(all.open)
}
