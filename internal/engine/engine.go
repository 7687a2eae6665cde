package engine

import (
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
)

// Engine is what the locks and semaphores of one client share.
type Engine struct {
	Queues
	Session *session.Session

	lost        lostHolds
	hashRenewer watchdog.Renewer
	nested      Nested
}

// New returns the engine of a client. There is one for each session.
func New(s *session.Session) *Engine {
	e := &Engine{Session: s, hashRenewer: ScriptRenewer{Client: s.Client, Script: HashRenewScript}}
	e.Queues.init(Config{
		Wheel:        s.Watchdog.Wheel(),
		Subscribe:    s.Subscribe,
		SubscribeOwn: s.SubscribeOwn,
		Subscribed:   s.Hub.Subscribed,
		Turn:         s.Turn,
		Go:           s.Go,
		OnWait:       s.Contended,
		Open:         s.StopContext(),
	})
	s.List(e.Queues.Holds)
	s.Count(e.Queues.Stats)
	return e
}

// HashRenewer returns the renewer of locks that are a hash with a field for each owner.
func (e *Engine) HashRenewer() watchdog.Renewer { return e.hashRenewer }
