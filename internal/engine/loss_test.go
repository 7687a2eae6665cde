package engine

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// single is the connection of a client that needs none.
type single struct{ rueidis.Client }

func (single) Mode() rueidis.ClientMode { return rueidis.ClientModeStandalone }

// newLock returns a lock of a client with such a connection, and its session.
func newLock(p Protocol, ordered bool) (*Lock, *session.Session) {
	s := session.New(session.Config{
		Client: single{}, ID: uuid.NewString(), WatchdogTimeout: time.Second, Ordered: ordered,
		Logger: slog.New(slog.DiscardHandler), MapName: func(name string) string { return name },
	})
	l := NewLock(New(s), p, "orders", nil)
	return &l, s
}

// willing is a server that grants everything, and has every claim that is released.
type willing struct{ Protocol }

func (willing) Kind() Kind                { return Kind{Name: "lock", Queue: "lock"} }
func (willing) Channel(*Claim) string     { return "" }
func (willing) Renewer() watchdog.Renewer { return nil }
func (willing) Acquire(context.Context, *Claim) (Answer, error) {
	return Answer{Acquired: true}, nil
}

func (willing) Release(context.Context, *Claim) (Release, error) {
	return Release{State: Free}, nil
}

// slowHolder is a holder that the watchdog takes a while to tell.
type slowHolder struct {
	watchdog.Holder
	telling, goOn chan struct{}
	told          bool
}

func (s *slowHolder) Lost(reason lock.Reason, cause error) {
	if !s.told {
		s.told = true
		close(s.telling)
		<-s.goOn
	}
	s.Holder.Lost(reason, cause)
}

// The watchdog has ended a lease, and not told the hold yet: the hold is lost all the same.
func TestUnlockTellsOfLossUnderWay(t *testing.T) {
	for name, leaseOf := range map[string]func(h *Hold) (*watchdog.Lease, watchdog.Holder){
		"of the claim": func(h *Hold) (*watchdog.Lease, watchdog.Holder) { return &h.claim.lease, h.claim },
		"of the hold":  func(h *Hold) (*watchdog.Lease, watchdog.Holder) { return &h.own.Lease, h.own },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLock(willing{}, true)
				defer s.Close()
				handle, err := l.TryLock(t.Context(), lock.Lease(time.Hour))
				require.NoError(t, err)
				h := handle.(*Handle).Droppable.(*Hold)
				lease, holder := leaseOf(h)
				late := &slowHolder{Holder: holder, telling: make(chan struct{}), goOn: make(chan struct{})}
				lease.Forget()
				s.Watchdog.Watch(lease, late, watchdog.Terms{Sent: time.Now(), TTL: time.Minute})
				<-late.telling
				err = handle.Unlock(t.Context())
				close(late.goOn)
				var loss *lock.LostError
				require.ErrorAs(t, err, &loss)
				require.Equal(t, lock.ReasonExpired, loss.Reason)
				require.ErrorIs(t, handle.Unlock(t.Context()), lock.ErrNotHeld)
			})
		})
	}
}
