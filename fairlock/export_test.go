package fairlock

import (
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
)

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

// Preceded puts Lua before every script of the package, until undo is called.
func Preceded(lua string) (undo func()) {
	scripts := []struct {
		script **wire.Script
		source string
	}{
		{&acquireScript, placesLua + acquireLua},
		{&acquireNamedScript, placesLua + acquireNamedLua},
		{&releaseScript, placesLua + releaseLua},
		{&releaseNamedScript, placesLua + releaseNamedLua},
		{&extendScript, locking.ExtendLua},
		{&leaveScript, placesLua + leaveLua},
		{&beatScript, placesLua + beatLua},
		{&forceUnlockScript, placesLua + forceUnlockLua},
		{&queueScript, placesLua + queueLua},
	}
	shipped := make([]*wire.Script, len(scripts))
	for i, s := range scripts {
		shipped[i] = *s.script
		*s.script = wire.NewScript(lua + s.source)
	}
	return func() {
		for i, s := range scripts {
			*s.script = shipped[i]
		}
	}
}
