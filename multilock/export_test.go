package multilock

import (
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
)

// Voter makes the attempts of a member of a Redlock.
type Voter = voter

// VoterHold is the hold of a member of a Redlock.
type VoterHold = memberHold

// NewRedOf returns a Redlock over locks with voters of their own.
func NewRedOf(s *session.Session, locks []*locking.Lock, voters []Voter) *Red {
	members := make([]redMember, len(locks))
	for i, l := range locks {
		members[i] = redMember{l, voters[i]}
	}
	return newRed(s, members, nil)
}

// WasAsked makes Redlocks not wait for the server of a client to be identified.
func WasAsked(s *session.Session) { session.Of[asked](s).Store(true) }
