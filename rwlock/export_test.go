package rwlock

import (
	"context"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
)

// Protocol is one of the two, with all that it can do.
type Protocol interface {
	locking.Protocol
	Force(ctx context.Context, key string) (bool, error)
	IsLocked(ctx context.Context, key string) (bool, error)
}

func (p *protocol) Force(ctx context.Context, key string) (bool, error) { return p.force(ctx, key) }
func (p *protocol) IsLocked(ctx context.Context, key string) (bool, error) {
	return p.isLocked(ctx, key)
}

// Protocols returns that of readers and that of writers.
func Protocols(s *session.Session) (read, write Protocol) {
	return newReadProtocol(s), newWriteProtocol(s)
}

// WithPartialCounts makes a protocol one of a cluster where messages go to all nodes.
func WithPartialCounts(p Protocol) Protocol {
	switch p := p.(type) {
	case *readProtocol:
		p.partialCounts = true
	case *writeProtocol:
		p.partialCounts = true
	}
	return p
}

const (
	WriterLife  = writerLife
	WriterPause = writerPause
	LatchLife   = latchLife
)
