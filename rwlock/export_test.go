package rwlock

import (
	"context"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
)

// Protocol is the protocol of readers or of writers.
type Protocol interface {
	engine.Protocol
	Force(ctx context.Context, key string) (bool, error)
	IsLocked(ctx context.Context, key string) (bool, error)
}

func (p *protocol) Force(ctx context.Context, key string) (bool, error) { return p.force(ctx, key) }
func (p *protocol) IsLocked(ctx context.Context, key string) (bool, error) {
	return p.isLocked(ctx, key)
}

// Protocols returns the protocols of readers and of writers.
func Protocols(s *session.Session) (read, write Protocol) {
	return newProtocols(s)
}

const (
	WriterLife  = writerLife
	WriterPause = writerPause
)
