package semaphore

import "github.com/redlatch/redlatch/internal/wire"

// Scripts are the scripts of both semaphores.
var Scripts = map[string]*wire.Script{
	"acquire": acquireScript, "undo": undoScript, "release": releaseScript,
	"set": setScript, "add": addScript, "drain": drainScript, "leave": leaveScript,
	"permit_acquire": permitAcquireScript, "permit_undo": permitUndoScript, "permit_release": permitReleaseScript,
	"permit_set": permitSetScript, "permit_counts": permitCountsScript, "permit_left": permitLeftScript,
	"permit_extend": permitExtendScript, "permit_renew": permitRenewScript,
}
