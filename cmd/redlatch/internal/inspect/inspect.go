// Package inspect reads locks and other objects from a server: their kinds, holders and waiters.
// It only reads.
package inspect

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// most is how many elements of a key are read. It bounds the time of a script.
const most = 1000

//go:embed lua/read.lua
var readSource string

var readScript = wire.NewScript(readSource).AtRest()

// Reader reads objects over a connection. One goroutine at a time may use it.
type Reader struct {
	Conn rueidis.Client
	// Prefix precedes the names in keys.
	Prefix string

	clients clients
}

// The keys of a snapshot, in the order of the script.
const (
	mainKey = iota
	tokenKey
	queueKey
	timeoutsKey
	aliveKey
	writersKey
	permitsKey
	waitingKey
	createdKey
	roundKey
	termKey
	ratePermitsKey
	doneKey // only of a slot of once-only work
	numKeys
)

// roles are the roles of these keys. The main key has none.
var roles = [numKeys]wire.Role{
	tokenKey: wire.RoleFencingToken, queueKey: wire.RoleFairQueue, timeoutsKey: wire.RoleFairTimeouts,
	aliveKey: wire.RoleFairAlive, writersKey: wire.RoleWriterWaits, permitsKey: wire.RolePermitTimeouts,
	waitingKey: wire.RoleSemaphoreAlive, createdKey: wire.RoleSemaphoreCreated, roundKey: wire.RoleLatchRound,
	termKey: wire.RoleElectionTerm, ratePermitsKey: wire.RoleRatePermits, doneKey: wire.RoleOnceDone,
}

// The channels of a snapshot.
const (
	lockChannel = iota
	rwChannel
	semaphoreChannel
	latchChannel
	plainChannel
	electionChannel
	rateChannel
	numChannels
)

// Read returns the object of that name. It blocks for a reply.
func (r *Reader) Read(ctx context.Context, name string) (Object, error) {
	objects, err := r.ReadAll(ctx, []string{name})
	if err != nil {
		return Object{}, err
	}
	return objects[0], nil
}

// ReadAll returns the objects of those names, in their order. It blocks for the replies.
func (r *Reader) ReadAll(ctx context.Context, names []string) ([]Object, error) {
	return r.read(ctx, names, func(error) bool { return false })
}

// ReadSome is ReadAll without the names that the server does not let the user read.
func (r *Reader) ReadSome(ctx context.Context, names []string) ([]Object, error) {
	return r.read(ctx, names, wire.IsRefused)
}

// read leaves out the names whose error can be skipped.
func (r *Reader) read(ctx context.Context, all []string, skips func(error) bool) ([]Object, error) {
	cluster := r.Conn.Mode() == rueidis.ClientModeCluster
	var asked []wire.Call
	for _, name := range all {
		if err := wire.CheckName(name, cluster); err != nil {
			return nil, err
		}
		asked = append(asked, callOf(keyOf(r.Prefix, name), cluster))
	}
	var names []string
	var calls []wire.Call
	var snapshots []snapshot
	for i, reply := range readScript.ExecMany(ctx, r.Conn, asked, false) {
		s, err := parse(reply, len(asked[i].Keys))
		if err != nil && skips(err) {
			continue
		}
		if err != nil {
			return nil, r.NameDenied(ctx, fmt.Errorf("read %q: %w", all[i], err), ofRead, all[i])
		}
		names, calls, snapshots = append(names, all[i]), append(calls, asked[i]), append(snapshots, s)
	}
	if cluster {
		r.countPlain(ctx, calls, snapshots)
	}
	var objects []Object
	for i, s := range snapshots {
		objects = append(objects, s.object(names[i], calls[i].Keys[mainKey]))
	}
	return objects, nil
}

// keysOf returns the main key and the helper keys of an object.
func keysOf(key string) []string {
	keys := []string{key}
	for _, role := range roles[mainKey+1 : doneKey] {
		keys = append(keys, wire.Forms[role].Of(key))
	}
	if work, slot, ok := SlotOf(key); ok {
		keys = append(keys, wire.OnceDone(work, slot))
	}
	return keys
}

// callOf returns the call of the script for an object.
func callOf(key string, cluster bool) wire.Call {
	sharded := "0"
	if cluster {
		sharded = "1"
	}
	args := []string{strconv.Itoa(most), wire.ReadHoldTimeouts(key), waiterPrefix(key), sharded}
	return wire.Call{Keys: keysOf(key), Args: append(args, channelsOf(key)...)}
}

// channelsOf returns the channels of an object, except those of waiters.
func channelsOf(key string) []string {
	return []string{
		wire.LockChannel(key), wire.RWChannel(key), wire.SemaphoreChannel(key), wire.LatchChannel(key),
		wire.PlainChannel(key), wire.ElectionChannel(key), wire.RateChannel(key),
	}
}

// waiterPrefix precedes a waiter in the name of its channel.
func waiterPrefix(key string) string { return wire.LockChannel(key) + ":" }

// snapshot is the state of the keys at one moment.
type snapshot struct {
	now      time.Time
	keys     []value
	readers  map[string]time.Duration // the longest read hold of a field
	channels []int                    // subscribers, -1 if unknown
	waiters  []int                    // subscribers of the channels of the waiters
}

// value is a key and some of its elements.
type value struct {
	kind     string
	ttl      time.Duration // negative if it does not expire
	size     int
	elements []string
}

// parse parses the reply of the script about n keys.
func parse(reply rueidis.RedisResult, n int) (snapshot, error) {
	parts, err := wire.List(reply, 5, 5)
	if err != nil {
		return snapshot{}, err
	}
	now, err := wire.Times.Number(parts[0])
	s := snapshot{now: time.UnixMilli(now), readers: map[string]time.Duration{}}
	keys, keysErr := wire.Elements(parts[1], n, n+1) // AtRest adds a key
	readers, readersErr := wire.Elements(parts[2], 0, 2*most)
	channels, channelsErr := wire.Elements(parts[3], numChannels, numChannels)
	waiters, waitersErr := wire.Elements(parts[4], 0, most)
	if err = errors.Join(err, keysErr, readersErr, channelsErr, waitersErr); err != nil {
		return s, err
	}
	for _, k := range keys[:n] {
		v, err := parseValue(k)
		if err != nil {
			return s, err
		}
		s.keys = append(s.keys, v)
	}
	if len(waiters) > len(s.keys[queueKey].elements) {
		return s, wire.ErrReply
	}
	for i := 1; i < len(readers); i += 2 {
		field, err := wire.Text(readers[i-1])
		ttl, ttlErr := wire.Times.Number(readers[i])
		if err = errors.Join(err, ttlErr); err != nil {
			return s, err
		}
		s.readers[field] = max(s.readers[field], wire.Duration(ttl))
	}
	s.channels, channelsErr = subscribers(channels)
	s.waiters, waitersErr = subscribers(waiters)
	return s, errors.Join(channelsErr, waitersErr)
}

// subscribers parses numbers of subscribers, -1 if they are unknown.
func subscribers(list []rueidis.RedisMessage) (counts []int, err error) {
	for _, m := range list {
		n, numErr := wire.Range{Least: -1, Most: math.MaxInt32}.Number(m)
		counts, err = append(counts, int(n)), errors.Join(err, numErr)
	}
	return counts, err
}

func parseValue(m rueidis.RedisMessage) (v value, err error) {
	parts, err := wire.Elements(m, 4, 4)
	if err != nil {
		return v, err
	}
	kind, kindErr := wire.Text(parts[0])
	ttl, ttlErr := wire.Times.Number(parts[1])
	size, sizeErr := wire.Range{Most: math.MaxInt64}.Number(parts[2])
	elements, elementsErr := parts[3].AsStrSlice()
	v = value{kind: kind, ttl: wire.Duration(ttl), size: int(size), elements: elements}
	return v, errors.Join(kindErr, ttlErr, sizeErr, elementsErr)
}

// isMissing reports whether the key does not exist.
func (v value) isMissing() bool { return v.kind == "none" }

// text returns the value of a string, shortened to 256 bytes.
func (v value) text() string {
	if v.kind != "string" {
		return ""
	}
	return strings.Join(v.elements, "")
}

// number returns the value of a string that is an integer.
func (v value) number() (n int64, ok bool) {
	n, err := strconv.ParseInt(v.text(), 10, 64)
	return n, err == nil
}

// pairs returns the elements of a hash or sorted set, by field or member.
func (v value) pairs() map[string]string {
	all := map[string]string{}
	if v.kind != "hash" && v.kind != "zset" {
		return all
	}
	for i := 0; i+1 < len(v.elements); i += 2 {
		all[v.elements[i]] = v.elements[i+1]
	}
	return all
}
