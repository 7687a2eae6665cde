// Package wire knows the format that redlatch shares with Redisson: every key
// and channel name, every payload, and how scripts are sent. Nothing else in
// the module spells a name that another process will read.
package wire

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/redlatch/redlatch/lock"
)

// prefixName puts p before a name so that both share a cluster slot: the name
// gets braces unless it brings its own.
func prefixName(p, name string) string {
	if strings.Contains(name, "{") {
		return p + ":" + name
	}
	return p + ":{" + name + "}"
}

// suffixName puts s behind a name so that both share a cluster slot.
func suffixName(name, s string) string {
	if strings.Contains(name, "{") {
		return name + ":" + s
	}
	return "{" + name + "}:" + s
}

// LockChannel is where the release of a lock, fenced lock or non-reentrant
// lock is published.
func LockChannel(name string) string { return prefixName("redisson_lock__channel", name) }

// FencingToken is the counter of a fenced lock.
func FencingToken(name string) string { return prefixName("redisson_lock_token", name) }

// UnlockLatch is the key that remembers the result of one unlock request, so
// that its repetition does not unlock twice.
func UnlockLatch(name, requestID string) string {
	return prefixName("redisson_unlock_latch", name) + ":" + requestID
}

// FairQueue is the list of the waiters of a fair lock.
func FairQueue(name string) string { return prefixName("redisson_lock_queue", name) }

// FairTimeouts is the sorted set of their deadlines.
func FairTimeouts(name string) string { return prefixName("redisson_lock_timeout", name) }

// FairChannel is where one waiter of a fair lock is told that it is next.
func FairChannel(name string, owner lock.Owner) string {
	return LockChannel(name) + ":" + owner.String()
}

// FairAlive is the sorted set of the waiters that give signs of life, with the
// time at which each is taken for dead. Redisson does not know it.
func FairAlive(name string) string { return prefixName("redlatch_lock_alive", name) }

// RWChannel is where the release of a read or write lock is published.
func RWChannel(name string) string { return prefixName("redisson_rwlock", name) }

// WriteSuffix is what the field of an owner that holds the write lock ends with.
const WriteSuffix = ":write"

// WriteOwner is the field of an owner that holds the write lock.
func WriteOwner(o lock.Owner) string { return o.String() + WriteSuffix }

// ReadHoldTimeout is the key whose expiry is that of an owner's n-th read hold.
func ReadHoldTimeout(name string, o lock.Owner, n int) string {
	return suffixName(name, o.String()) + ":rwlock_timeout:" + strconv.Itoa(n)
}

// ReadHoldTimeouts is what the keys of all read holds of a name begin with.
func ReadHoldTimeouts(name string) string { return suffixName(name, "") }

// WriterWaits is the key that keeps new readers out while a writer waits.
// Redisson does not know it.
func WriterWaits(name string) string { return prefixName("redlatch_rwlock_writer", name) }

// SemaphoreChannel is where both kinds of semaphore publish released permits.
func SemaphoreChannel(name string) string { return prefixName("redisson_sc", name) }

// PermitTimeouts is the sorted set of the permits of an expirable semaphore.
func PermitTimeouts(name string) string { return suffixName(name, "timeout") }

// SemaphoreRequest is the key that remembers the last request of a lane of a client
// and what became of it. Redisson does not know it.
func SemaphoreRequest(name, client string, lane int) string {
	return prefixName("redlatch_sc_request", name) + ":" + client + ":" + strconv.Itoa(lane)
}

// SemaphoreWaiting is the sorted set of the clients whose first request has waited
// for long, with the time since when, and SemaphoreAlive that of the times at which
// each is taken for dead. Redisson does not know them.
func SemaphoreWaiting(name string) string { return prefixName("redlatch_sc_waiting", name) }

// SemaphoreAlive: see SemaphoreWaiting.
func SemaphoreAlive(name string) string { return prefixName("redlatch_sc_alive", name) }

// LatchChannel is where a count-down latch publishes. Unlike all others it gets
// its braces even when the name has some.
func LatchChannel(name string) string {
	return "redisson_countdownlatch__channel__{" + name + "}"
}

// LatchRound is the key that tells one round of a count-down latch from the next.
// Redisson does not know it.
func LatchRound(name string) string { return prefixName("redlatch_latch_round", name) }

// ServerMark is the key that tells servers apart that do not say who they are. Redisson
// does not know it.
const ServerMark = "redlatch_server_mark"

// PlainChannel is where the release of a plain lock is published, by redlatch only.
func PlainChannel(name string) string { return prefixName("redlatch_plain__channel", name) }

// Payloads of the channels, decimal like all numbers on the wire.
const (
	PayloadUnlocked  = "0" // a lock, a fair lock, or the last read lock is free
	PayloadWriteFree = "1" // the write lock is free: every waiter may try
	PayloadLatchOpen = "0"
	PayloadLatchShut = "1"
	PayloadLeftOpen  = "1" // a plain lock is free, and left to those who poll for a while
)

// NewRequestID returns a random id in its text form, 32 hexadecimal digits.
func NewRequestID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return hex.EncodeToString(b[:])
}

// CheckName returns an error that matches lock.ErrInvalid for a name no object
// can have: an empty one, or one whose helper keys would fall into another
// cluster slot than the name itself. Those are refused on a single server too,
// so that a program does not stop working the day it moves to a cluster.
func CheckName(name string) error {
	if name == "" {
		return fmt.Errorf("%w: the name is empty", lock.ErrInvalid)
	}
	// A name gets a pair of braces around it unless it has a tag of its own. One brace of
	// its own would keep that from being the tag.
	if strings.ContainsAny(name, "{}") && hashTag(name) == name {
		return fmt.Errorf("%w: name %q: its braces would put its keys into different cluster slots", lock.ErrInvalid, name)
	}
	return nil
}

// CheckLatchName is CheckName for count-down latches, whose channel allows no
// braces in the name.
func CheckLatchName(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if hashTag(LatchChannel(name)) != hashTag(name) {
		return fmt.Errorf("%w: name %q: the braces of a latch's name would put its channel into another cluster slot", lock.ErrInvalid, name)
	}
	return nil
}

// hashTag returns the part of a key that decides its slot: what stands between
// the first "{" and the next "}", if that is not empty, else the whole key.
func hashTag(key string) string {
	_, rest, ok := strings.Cut(key, "{")
	if !ok {
		return key
	}
	tag, _, ok := strings.Cut(rest, "}")
	if !ok || tag == "" {
		return key
	}
	return tag
}

// slots is the number of hash slots of a cluster.
const slots = 16384

// Slot returns the cluster slot of a key: CRC16 (XMODEM) of its hash tag,
// modulo 16384, as the Redis Cluster specification defines it.
func Slot(key string) int {
	var crc uint16
	for _, b := range []byte(hashTag(key)) {
		crc ^= uint16(b) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc % slots)
}
