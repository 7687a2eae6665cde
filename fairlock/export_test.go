package fairlock

import (
	"context"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Protocol is the protocol under test.
type Protocol = protocol

// NewProtocol returns the protocol of a lock object with that key and those options.
func NewProtocol(s *session.Session, key string, opts ...Option) *Protocol {
	p := &protocol{e: engine.New(s), s: s, kind: "fair"}
	p.prepare(key)
	for _, opt := range opts {
		opt(p)
	}
	return p
}

// ConfirmClaim runs confirm.lua, and returns its reply.
func ConfirmClaim(ctx context.Context, p *Protocol, c *engine.Claim, had, waiting []string) (reply [2]int64, err error) {
	a, err := p.Confirm(ctx, c, engine.OwnershipCheck{Passed: owners(had), Next: owners(waiting)})
	if a.Held {
		reply[0] = 1
	}
	reply[1] = int64(a.Ready)
	return reply, err
}

// ReleaseAfter releases a claim after other waiters have had the lock.
func ReleaseAfter(ctx context.Context, p *Protocol, c *engine.Claim, had []string) (engine.Release, error) {
	last := *c
	last.Passed = owners(had)
	return p.Release(ctx, &last)
}

func owners(names []string) []lock.Owner {
	all := make([]lock.Owner, len(names))
	for i, name := range names {
		all[i], _ = lock.ParseOwner(name)
	}
	return all
}
