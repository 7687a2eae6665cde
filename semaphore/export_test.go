package semaphore

import (
	"github.com/redlatch/redlatch/internal/wire"
)

// StartRelease is called before a release of p by its id.
func (p *Permit) StartRelease() { p.p.releasing.Add(1) }

// EndRelease is called when the release has been answered.
func (p *Permit) EndRelease(released bool) { p.p.endRelease(released, false) }

// Weight returns the cost of a renewal.
func (p *Permit) Weight() int { return int(p.p.lease.Weight) }

// Gone is called when the server does not have the permit.
func (p *Permit) Gone() { p.p.gone() }

// WarnMissing is called when a request waits for a semaphore that does not exist. It returns the
// number of names that the client remembers.
func (s *Semaphore) WarnMissing() int {
	s.warnMissing()
	return s.s.Warnings.Len()
}

// Scripts are the scripts of both semaphores.
var Scripts = map[string]*wire.Script{
	"acquire": acquireScript, "undo": undoScript, "release": releaseScript,
	"set": setScript, "add": addScript, "drain": drainScript, "leave": leaveScript,
	"resize": resizeScript, "delete": deleteScript, "stats": statsScript,
	"permit_acquire": permitAcquireScript, "permit_undo": permitUndoScript, "permit_release": permitReleaseScript,
	"permit_left": permitLeftScript, "permit_extend": permitExtendScript, "permit_renew": permitRenewScript,
	"permit_transfer": permitTransferScript,
	"fast_acquire":    fastAcquireScript, "fast_release": fastReleaseScript,
	"fast_permit_acquire": fastPermitAcquireScript, "fast_permit_release": fastPermitReleaseScript,
}
