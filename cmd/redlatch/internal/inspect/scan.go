package inspect

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// batch is the COUNT of a SCAN.
const batch = 500

// Scanner finds the names of objects, a batch at a time.
type Scanner struct {
	// All has Next return also the names of strings that expire, which may be locks of other libraries, and of
	// numbers, which may be semaphores or latches.
	All bool

	prefix  string
	cluster bool
	matches *regexp.Regexp
	nodes   []rueidis.Client // the primaries that are not finished
	cursor  uint64
}

// Scan returns a scanner of the names that match the pattern, a glob as in SCAN. It blocks until
// each node has reported its role.
func (r *Reader) Scan(ctx context.Context, pattern string) (*Scanner, error) {
	matches, err := compile(pattern)
	if err != nil {
		return nil, err
	}
	s := &Scanner{prefix: r.Prefix, cluster: r.Conn.Mode() == rueidis.ClientModeCluster, matches: matches}
	for addr, node := range r.Conn.Nodes() {
		role, err := wire.List(node.Do(ctx, node.B().Role().Build()), 1, math.MaxInt)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", addr, err)
		}
		if name, _ := role[0].ToString(); name == "master" {
			s.nodes = append(s.nodes, node)
		}
	}
	return s, nil
}

// CheckPattern returns an error if Scan does not accept a pattern.
func CheckPattern(pattern string) error {
	_, err := compile(pattern)
	return err
}

// compile returns the regular expression of a pattern.
func compile(pattern string) (*regexp.Regexp, error) {
	matches, err := regexp.Compile(expression(pattern))
	if err != nil { // which tells of the expression, and not of the pattern
		return nil, fmt.Errorf(`pattern %q: a set of characters must be like [a-z]; \[ is the character [ itself`, pattern)
	}
	return matches, nil
}

// expression returns the regular expression of a glob.
func expression(glob string) string {
	var out strings.Builder
	out.WriteString(`(?s)\A`)
	inClass := false
	for i := 0; i < len(glob); i++ {
		switch c := glob[i]; {
		case c == '\\' && i+1 < len(glob):
			i++
			out.WriteString(regexp.QuoteMeta(glob[i : i+1]))
		case inClass && (c == '-' || c == '^'), c == '[', c == ']':
			inClass = inClass && c != ']' || c == '['
			out.WriteByte(c)
		case c == '*':
			out.WriteString(".*")
		case c == '?':
			out.WriteByte('.')
		default:
			out.WriteString(regexp.QuoteMeta(glob[i : i+1]))
		}
	}
	return out.String() + `\z`
}

// Matches reports whether a name matches the pattern. For a slot, the name of its work may match it instead.
func (s *Scanner) Matches(name string) bool {
	if s.matches.MatchString(name) {
		return true
	}
	work, _, isSlot := SlotOf(name)
	return isSlot && s.matches.MatchString(work)
}

// Next returns the names of a batch of keys, and whether there are more. A name may come again.
// Some names may turn out to be no objects. It leaves out the keys that the user may not read, and those that
// no object can have. It blocks for two or three replies.
func (s *Scanner) Next(ctx context.Context) (names []string, more bool, err error) {
	if len(s.nodes) == 0 {
		return nil, false, nil
	}
	node := s.nodes[0]
	found, err := node.Do(ctx, node.B().Scan().Cursor(s.cursor).Count(batch).Build()).AsScanEntry()
	if err != nil {
		return nil, false, err
	}
	if s.cursor = found.Cursor; s.cursor == 0 {
		s.nodes = s.nodes[1:]
	}
	keys, err := mainKeys(ctx, node, found.Elements, s.All)
	if err != nil {
		return nil, false, err
	}
	add := func(name string, ok bool) {
		if ok && s.Matches(name) && wire.CheckName(name, s.cluster) == nil && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, key := range keys {
		add(nameOf(s.prefix, key))
	}
	for _, key := range found.Elements {
		add(ownerOf(s.prefix, key))
	}
	return names, len(s.nodes) > 0, nil
}

// otherFields are the fields of a read-write lock and of a rate limiter that are not owners.
var otherFields = []string{"mode", "rate", "interval", "type", "keepAliveTime"}

// mainKeys returns the keys that hold a lock, a group or the configuration of a rate limiter, and with all those that
// may be the main key of another object.
func mainKeys(ctx context.Context, node rueidis.Client, keys []string, all bool) (locks []string, err error) {
	var types, looks rueidis.Commands
	for _, key := range keys {
		types = append(types, node.B().Type().Key(key).Build())
	}
	var of []string
	isString := map[string]bool{}
	for i, reply := range node.DoMulti(ctx, types...) {
		switch kind, err := reply.ToString(); {
		case err != nil && !wire.IsRefused(err):
			return nil, err
		case kind == "hash":
			looks, of = append(looks, node.B().Hrandfield().Key(keys[i]).Build()), append(of, keys[i])
		case kind == "string":
			isString[keys[i]] = true
			looks, of = append(looks, node.B().Getrange().Key(keys[i]).Start(0).End(63).Build()), append(of, keys[i])
		}
	}
	var others, numbers []string
	for i, reply := range node.DoMulti(ctx, looks...) {
		text, err := reply.ToString()
		if rueidis.IsRedisNil(err) || wire.KindOf(err) == nil && err != nil {
			continue // it was replaced meanwhile
		}
		if err != nil {
			return nil, err
		}
		_, err = lock.ParseOwner(strings.TrimSuffix(text, wire.WriteSuffix))
		isField := slices.Contains(otherFields, text) || groupField.MatchString(text)
		if err == nil || isField && !isString[of[i]] {
			locks = append(locks, of[i])
			continue
		}
		if _, err := strconv.ParseInt(text, 10, 64); err == nil && isString[of[i]] {
			numbers = append(numbers, of[i])
		} else if isString[of[i]] {
			others = append(others, of[i])
		}
	}
	if !all {
		return locks, nil
	}

	expiring, err := expiring(ctx, node, others)
	maybe := slices.DeleteFunc(append(numbers, expiring...), func(key string) bool {
		_, isHelper := wire.ParseKey(key)
		return isHelper || key == wire.ServerMark
	})
	return append(locks, maybe...), err
}

// expiring returns the keys that have an expiry.
func expiring(ctx context.Context, node rueidis.Client, keys []string) (some []string, err error) {
	var asked rueidis.Commands
	for _, key := range keys {
		asked = append(asked, node.B().Pttl().Key(key).Build())
	}
	for i, reply := range node.DoMulti(ctx, asked...) {
		left, err := reply.AsInt64()
		if err != nil && !wire.IsRefused(err) {
			return nil, err
		}
		if left > 0 {
			some = append(some, keys[i])
		}
	}
	return some, nil
}

// Contended returns the keys of the objects for whose messages somebody waits. It blocks for the
// replies of all nodes. Waiters of a spin lock, and those that poll, do not show.
func (r *Reader) Contended(ctx context.Context) (names []string, err error) {
	for addr, node := range r.Conn.Nodes() {
		for _, command := range []string{"CHANNELS", "SHARDCHANNELS"} {
			if command == "SHARDCHANNELS" && r.Conn.Mode() != rueidis.ClientModeCluster {
				continue
			}
			channels, err := node.Do(ctx, node.B().Arbitrary("PUBSUB", command).Args("red*").Build()).AsStrSlice()
			if err != nil && wire.KindOf(err) != nil {
				return nil, fmt.Errorf("node %s: %w", addr, err)
			}
			for _, channel := range channels {
				name, ok := ownerOf(r.Prefix, channel)
				if ok && wire.CheckName(name, r.Conn.Mode() == rueidis.ClientModeCluster) == nil && !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names, nil
}
