// Package wire defines the format that redlatch shares with Redisson: key and channel
// names, payloads, and how scripts are sent. No other package spells a name that
// another process reads.
package wire

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/redlatch/redlatch/lock"
)

// prefixName prepends p to a name so that both share a cluster slot: it adds braces
// unless the name contains some.
func prefixName(p, name string) string {
	if strings.Contains(name, "{") {
		return p + ":" + name
	}
	return p + ":{" + name + "}"
}

// suffixName appends s to a name so that both share a cluster slot.
func suffixName(name, s string) string {
	if strings.Contains(name, "{") {
		return name + ":" + s
	}
	return "{" + name + "}:" + s
}

// ownName prepends p to a name as prefixName does, for a key or channel that Redisson does not use. No
// other name has the same: "{a}" gets another prefix than "a", which gets the same braces.
func ownName(p, name string) string {
	if strings.Contains(name, "{") {
		p += "_tagged"
	}
	return prefixName(p, name)
}

// LockChannel is the channel for releases of a lock, fenced lock or non-reentrant lock.
func LockChannel(name string) string { return prefixName("redisson_lock__channel", name) }

// FencingToken is the counter of a fenced lock.
func FencingToken(name string) string { return prefixName("redisson_lock_token", name) }

// FairQueue is the list of waiters of a fair lock.
func FairQueue(name string) string { return prefixName("redisson_lock_queue", name) }

// FairTimeouts is the sorted set of the waiters' deadlines.
func FairTimeouts(name string) string { return prefixName("redisson_lock_timeout", name) }

// FairChannel is the channel that notifies one waiter of a fair lock that it is next.
func FairChannel(name string, owner lock.Owner) string {
	return LockChannel(name) + ":" + owner.String()
}

// FairAlive is the sorted set of waiters that send heartbeats, with the time at which
// each counts as dead. Redisson does not use it. Names that share a queue share it too.
func FairAlive(name string) string { return prefixName("redlatch_lock_alive", name) }

// FairOrder is the sorted set of these waiters in the order in which they came. Redisson
// does not use it.
func FairOrder(name string) string { return prefixName("redlatch_lock_order", name) }

// RWChannel is the channel for releases of a read or write lock.
func RWChannel(name string) string { return prefixName("redisson_rwlock", name) }

// WriteSuffix ends the hash field of an owner that holds the write lock.
const WriteSuffix = ":write"

// WriteOwner is the hash field of an owner that holds the write lock.
func WriteOwner(o lock.Owner) string { return o.String() + WriteSuffix }

// ReadHoldTimeout is the key that expires with an owner's n-th read hold.
func ReadHoldTimeout(name, owner string, n int) string {
	return suffixName(name, owner) + ":rwlock_timeout:" + strconv.Itoa(n)
}

// ReadHoldTimeouts is the prefix of the keys of all read holds of a name.
func ReadHoldTimeouts(name string) string { return suffixName(name, "") }

// WriterWaits is the key that blocks new readers while a writer waits. Redisson does
// not use it.
func WriterWaits(name string) string { return ownName("redlatch_rwlock_writer", name) }

// SemaphoreChannel is the channel for released permits of both kinds of semaphore.
func SemaphoreChannel(name string) string { return prefixName("redisson_sc", name) }

// PermitTimeouts is the sorted set of the permits of a permit semaphore.
func PermitTimeouts(name string) string { return suffixName(name, "timeout") }

// SemaphoreRequests is the key that stores the sequence numbers and the cached replies of a
// client's last requests, by their slots. Redisson does not use it.
func SemaphoreRequests(name, client string) string {
	return semaphoreRequests(name) + ":" + client
}

func semaphoreRequests(name string) string { return ownName("redlatch_sc_request", name) }

// SemaphoreCreated is the key that stores when a semaphore was created or deleted. Redisson does
// not use it.
func SemaphoreCreated(name string) string {
	return SemaphoreRequests(name, "created") // no client has this id
}

// SemaphoreWaiting is the wait queue of a semaphore: a sorted set of clients with the
// time since which each has waited. Redisson does not use it.
func SemaphoreWaiting(name string) string { return ownName("redlatch_sc_waiting", name) }

// SemaphoreAlive is the sorted set of these clients with the time at which each counts as
// dead. Redisson does not use it.
func SemaphoreAlive(name string) string { return ownName("redlatch_sc_alive", name) }

// RateValue is the number of free permits of a rate limiter.
func RateValue(name string) string { return suffixName(name, "value") }

// RatePermits is the sorted set of the permits of a rate limiter that were acquired in the window.
func RatePermits(name string) string { return suffixName(name, "permits") }

// RateValueOf is RateValue for a client with permits of its own.
func RateValueOf(name, client string) string { return suffixName(RateValue(name), client) }

// RatePermitsOf is RatePermits for a client with permits of its own.
func RatePermitsOf(name, client string) string { return suffixName(RatePermits(name), client) }

// RateTurn is the key with the client that is the next to get permits of a rate limiter. Redisson does not
// use it.
func RateTurn(name string) string { return ownName("redlatch_rl_turn", name) }

// RateReply is the key that caches the reply to a release of permits of a rate limiter. Redisson does not use it.
func RateReply(name, request string) string { return rateReply(name) + ":" + request }

func rateReply(name string) string { return ownName("redlatch_rl_reply", name) }

// RateChannel is the channel that tells waiters that permits may be free earlier than they were told. Redisson
// does not use it.
func RateChannel(name string) string { return ownName("redlatch_rl__channel", name) }

// LatchChannel is the channel of a count-down latch. Unlike all others it adds braces
// even if the name contains some.
func LatchChannel(name string) string {
	return "redisson_countdownlatch__channel__{" + name + "}"
}

// LatchRound is the key that holds the id of a latch's round. Redisson does not use it.
func LatchRound(name string) string { return ownName("redlatch_latch_round", name) }

// ElectionTerm is the hash with the last term of an election. Redisson has no elections.
func ElectionTerm(name string) string { return ownName("redlatch_election", name) }

// ElectionChannel is the channel on which a leader announces its term.
func ElectionChannel(name string) string { return ownName("redlatch_election__channel", name) }

// OnceRun is the lock of a run of a Once for a slot. Redisson has no such object.
func OnceRun(name, slot string) string { return onceKey(onceRuns(name), slot) }

// OnceDone is the key that exists if such a run has succeeded.
func OnceDone(name, slot string) string { return onceKey(onceDones(name), slot) }

func onceRuns(name string) string  { return ownName("redlatch_once", name) }
func onceDones(name string) string { return ownName("redlatch_once_done", name) }

// onceKey returns a key that no other name and slot have: the last colon precedes the slot.
func onceKey(keys, slot string) string { return keys + ":" + url.QueryEscape(slot) }

// ServerMark is the key that identifies servers without a run id. Redisson does not use
// it.
const ServerMark = "redlatch_server_mark"

// PlainChannel is the channel for releases of a plain lock. Only redlatch publishes
// there.
func PlainChannel(name string) string { return ownName("redlatch_plain__channel", name) }

// Payloads of messages; decimal, like all numbers in the format.
const (
	PayloadUnlocked  = "0" // a lock, a fair lock, or the last read lock is free
	PayloadWriteFree = "1" // the write lock is free: all waiters may try
	PayloadLatchOpen = "0"
	PayloadLatchShut = "1"
	PayloadLeftOpen  = "1" // a plain lock is free and reserved for pollers for a while
)

// NewRequestID returns a random id of 32 hexadecimal digits.
func NewRequestID() string { return strings.ReplaceAll(uuid.NewString(), "-", "") }

// CheckName returns an error that matches lock.ErrInvalid if name is empty or, in a
// cluster, if its helper keys would have a different slot than the name.
func CheckName(name string, cluster bool) error {
	if name == "" {
		return fmt.Errorf("%w: the name is empty", lock.ErrInvalid)
	}

	// Helper keys put braces around a name without a hash tag. A brace in the name
	// would change that tag.
	if cluster && strings.ContainsAny(name, "{}") && HashTag(name) == name {
		return fmt.Errorf("%w: name %q: its braces would put its keys into different cluster slots", lock.ErrInvalid, name)
	}

	return nil
}

// maxStrictName is the length in bytes of the longest key that CheckStrictly accepts.
const maxStrictName = 512

// CheckStrictly returns an error that matches lock.ErrInvalid if an object with that key could share keys
// with one of another name, or if the key is very long.
func CheckStrictly(key string) error {
	tagged := strings.Contains(key, "{")
	switch {
	case len(key) > maxStrictName:
		return fmt.Errorf("%w: the name makes a key of %d bytes, more than %d", lock.ErrInvalid, len(key), maxStrictName)
	case key == "{"+HashTag(key)+"}":
		return fmt.Errorf("%w: name %q: it shares keys with the name without braces", lock.ErrInvalid, key)
	case strings.HasPrefix(key, "redisson_"), strings.HasPrefix(key, "redlatch_"),
		tagged && (strings.HasSuffix(key, ":timeout") || strings.Contains(key, ":rwlock_timeout:")),
		tagged && (strings.HasSuffix(key, ":value") || strings.HasSuffix(key, ":permits")),
		tagged && (strings.Contains(key, ":value:") || strings.Contains(key, ":permits:")):
		return fmt.Errorf("%w: name %q: it may be a key that belongs to another object", lock.ErrInvalid, key)
	}

	return nil
}

// CheckLatchName is CheckName for count-down latches, whose channel allows no braces in
// the name if it needs the slot of the name: with sharded pub/sub.
func CheckLatchName(name string, cluster, sharded bool) error {
	if err := CheckName(name, cluster); err != nil {
		return err
	}
	if sharded && HashTag(LatchChannel(name)) != HashTag(name) {
		return fmt.Errorf("%w: name %q: with sharded pub/sub the name of a latch may contain no braces, "+
			"because its channel would have another cluster slot", lock.ErrInvalid, name)
	}
	return nil
}

// HashTag returns the part of a key that determines its slot: the text between the
// first "{" and the next "}" unless it is empty, else the whole key.
func HashTag(key string) string {
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

// Slot returns the cluster slot of a key as the Redis Cluster specification defines it:
// CRC16 (XMODEM) of its hash tag, modulo 16384.
func Slot(key string) int {
	var crc uint16
	for _, b := range []byte(HashTag(key)) {
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
