package fairlock

import "github.com/redlatch/redlatch/internal/session"

// Protocol is the protocol under test.
type Protocol = protocol

// NewProtocol returns the protocol of a lock object with those options.
func NewProtocol(s *session.Session, opts ...Option) *Protocol {
	p := newProtocol(s)
	for _, opt := range opts {
		opt(p)
	}
	return p
}
