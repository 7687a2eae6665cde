package ratelimit

import "github.com/redlatch/redlatch/internal/wire"

// Scripts are the scripts, by operation.
var Scripts = map[string]*wire.Script{
	"acquire": acquireScript, "undo": undoScript, "leave": leaveScript, "release": releaseScript,
	"set": setRateScript, "try set": trySetRateScript, "delete": deleteScript, "available": availableScript,
}

const (
	TurnGrace = turnGrace
	ReplyTTL  = replyTTL
)

// NewEntry returns the entry of a request for n permits.
func NewEntry(n int) string { return newEntry(n) }
