package inspect

import (
	"strings"

	"github.com/redlatch/redlatch/internal/wire"
)

// SlotOf returns the work and the slot of once-only work if a name or a key is the key of the lock of its run, or of its
// memory.
func SlotOf(name string) (work, slot string, ok bool) {
	k, ok := wire.ParseKey(name)
	if ok {
		slot, ok = k.Slot()
	}
	return k.Name, slot, ok
}

// keyOf returns the main key of a name. The prefix of a slot precedes the name of its work, within the key.
func keyOf(prefix, name string) string {
	if work, slot, ok := SlotOf(name); ok {
		return wire.OnceRun(prefix+work, slot)
	}
	return prefix + name
}

// nameOf returns the name of a main key, or of the memory of a slot, if the key has the prefix.
func nameOf(prefix, key string) (name string, ok bool) {
	work, slot, isSlot := SlotOf(key)
	if !isSlot {
		return strings.CutPrefix(key, prefix)
	}
	work, ok = strings.CutPrefix(work, prefix)
	return wire.OnceRun(work, slot), ok && work != ""
}

// ownerOf returns the name of the object to which a helper key or a channel belongs.
func ownerOf(prefix, key string) (name string, ok bool) {
	k, ok := wire.ParseKey(key)
	if !ok {
		return "", false
	}
	if _, isSlot := k.Slot(); !isSlot {
		key = k.Name
	}
	return nameOf(prefix, key)
}
