package grouplock

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
)

// Protocol is the protocol of the lock of some values.
type Protocol interface {
	engine.Protocol
	Force(ctx context.Context, key string) (bool, error)
	Status(ctx context.Context, key, owner string) (left time.Duration, count int64, err error)
}

func (p *protocol) Force(ctx context.Context, key string) (bool, error) { return p.force(ctx, key) }
func (p *protocol) Status(ctx context.Context, key, owner string) (time.Duration, int64, error) {
	return p.status(ctx, key, owner)
}

// NewProtocol returns the protocol of values with these fields.
func NewProtocol(s *session.Session, fields []string) Protocol { return &protocol{s, fields} }

var FieldOf = fieldOf
