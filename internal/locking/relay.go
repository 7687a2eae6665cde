package locking

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Relay is one claim that holds of this process have one after another, without the
// server being asked in between: who is done passes it on, the next one goes on with it,
// and only then the first asks whether it was still there, before its Unlock returns. One
// request answers for all who have passed it on before that was sent. So the lock changes
// hands as often as goroutines can, and nobody is told less about a loss: see Dice,
// Marathe and Shavit, "Lock Cohorting" (PPoPP 2012), for locks of a few inside the lock
// of all, and what databases call group commit for the requests.
//
// A nil Relay is that of a claim that has not been passed on.
type Relay struct {
	mu        sync.Mutex
	confirmed time.Time // when the last request that found the claim was sent
	gone      bool      // one did not find it
	asking    bool      // a request is under way, or about to be sent
	now, next *Leg      // what the latest is for; the one after it, if somebody waits for that
}

// Leg is those who have one request in common.
type Leg struct {
	ask  func() error
	lead chan struct{} // has room for one; who receives sends the request
	done chan struct{} // closed when err is the answer
	err  error
}

// trust is for how long the server's word is taken that the claim was there: long enough
// for some round trips to a server that is near. For one that is far claims are passed on
// by script.
const trust = 20 * time.Millisecond

// NewRelay returns the relay of a claim that the server has confirmed in the answer to a
// request sent then.
func NewRelay(confirmed time.Time) *Relay { return &Relay{confirmed: confirmed} }

// Join is called by whoever is about to pass the claim on. It is to be part of the next
// request even if the next one is done with the claim before it comes to ask.
func (r *Relay) Join() *Leg {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.join()
}

func (r *Relay) join() *Leg {
	if r.next == nil {
		r.next = &Leg{lead: make(chan struct{}, 1), done: make(chan struct{})}
	}
	return r.next
}

// Confirm returns what ask says of the claim: nil if it was there, an error that matches
// lock.ErrLost if not. It is for whoever has joined l and passed the claim on, and calls ask
// unless another does so for both. It blocks for two requests at most.
func (r *Relay) Confirm(l *Leg, ask func() error) error {
	r.mu.Lock()
	if l.ask == nil {
		l.ask = ask
	}
	return r.run(l)
}

// Finish is Confirm for the last who has the claim: end gives it back, and answers for
// those who have passed it on before.
func (r *Relay) Finish(end func() error) error {
	if r == nil {
		return end()
	}
	r.mu.Lock()
	l := r.join()
	l.ask = end
	return r.run(l)
}

// run waits for the answer to l, or leads. r.mu is held, and released.
func (r *Relay) run(l *Leg) error {
	if r.asking {
		r.mu.Unlock()
		select {
		case <-l.done:
			return l.err
		case <-l.lead:
		}
		r.mu.Lock()
	}
	if l != r.next { // somebody else was faster
		r.mu.Unlock()
		<-l.done
		return l.err
	}
	r.asking, r.now, r.next = true, l, nil
	r.mu.Unlock()
	r.request(l)
	return l.err
}

// request makes the request of l.
func (r *Relay) request(l *Leg) {
	sent := time.Now()
	l.err = errPanicked
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case l.err == nil:
			r.confirmed = sent
		case errors.Is(l.err, lock.ErrLost):
			r.gone = true
		}
		if r.next != nil {
			r.next.lead <- struct{}{}
		} else {
			r.asking = false
		}
		close(l.done)
	}()
	l.err = l.ask()
}

// errPanicked is for the others of a request that has panicked: it may be the user's code.
var errPanicked = fmt.Errorf("%w: a request that was made for others, too, has panicked", lock.ErrIndeterminate)

// Await waits until the request that is under way, if there is one, has its answer.
func (r *Relay) Await() {
	r.mu.Lock()
	l := r.now
	r.mu.Unlock()
	if l != nil {
		<-l.done
	}
}

// Trusted reports whether the claim can be passed on, and when the request was sent by
// whose answer it was there.
func (r *Relay) Trusted() (confirmed time.Time, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.confirmed, !r.gone && time.Since(r.confirmed) < trust
}

// Gone reports whether the server did not have the claim any more.
func (r *Relay) Gone() bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gone
}
