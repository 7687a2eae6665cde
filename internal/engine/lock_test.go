package engine

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

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

func (willing) Extend(context.Context, *Claim, time.Duration) (bool, error) { return true, nil }

func (willing) Release(context.Context, *Claim) (Release, error) {
	return Release{State: Free}, nil
}

// finding is a server on which a release finds that.
type finding struct {
	willing
	state ReleaseState
}

func (f finding) Release(context.Context, *Claim) (Release, error) {
	return Release{State: f.state}, nil
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

// A release that finds nothing may precede the acquisition, unless the server runs them in order.
func TestAReleaseThatFindsNothing(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		for _, state := range []ReleaseState{NotHeld, StillHeld, Free} {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLock(finding{state: state}, ordered)
				defer s.Close()
				undone := l.releaseUnknown(Claim{Lease: time.Minute}, true)
				time.Sleep(10 * time.Second) // the further releases
				require.Equal(t, ordered || state != NotHeld, session.Await(undone))
			})
		}
	}
}

// A waiter that has had the claim leaves the server's queue with the next check, of any kind.
func TestAWaiterLeavesWithTheNextCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, s := newLock(willing{}, true)
		defer s.Close()
		c := new(claim)
		c.init(t.Context(), l, &lock.Options{}, false)
		c.cohort = NewCohort(time.Now())
		c.cohort.passedOn(s.NewOwner())
		held, err := c.checkOwnership(t.Context(), time.Now().Add(time.Second))
		require.NoError(t, err)
		require.True(t, held)
		passed, _ := c.cohort.pending()
		require.Empty(t, passed)
	})
}

func TestTheOldestLossesAreForgotten(t *testing.T) {
	var l lostHolds
	all := make([]Hold, maxLost+2)
	for i := range all {
		l.add(&all[i])
	}
	l.remove(&all[0]) // it is not there
	require.Len(t, l.all, maxLost)
	require.Same(t, &all[2], l.all[0])
	l.remove(&all[3])
	require.Len(t, l.all, maxLost-1)
	require.Same(t, &all[4], l.all[1])
}

// A process may have many claims. Beyond this size one takes a larger piece of memory.
func TestClaimIsSmall(t *testing.T) { require.LessOrEqual(t, unsafe.Sizeof(claim{}), uintptr(576)) }
