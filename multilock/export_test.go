package multilock

import "github.com/redlatch/redlatch/internal/session"

// RedMember is a member of a Redlock.
type RedMember = redMember

// NewRedOf returns a Redlock of these members.
func NewRedOf(all *Shared, members []RedMember) *Red { return newRedOf(all, members, nil) }

// WasAsked makes Redlocks not wait for the server of a client to be identified.
func WasAsked(s *session.Session) { s.AwaitServer() }
