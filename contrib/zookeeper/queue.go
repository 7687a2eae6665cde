package zklock

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// A claim is an ephemeral node in the folder of its lock or semaphore:
//
//	PREFIX/locks/NAME/write_OWNER_ATTEMPT_SEQUENCE
//	PREFIX/locks/NAME/read_OWNER_ATTEMPT_SEQUENCE
//	PREFIX/semaphores/NAME/permit_OWNER_ATTEMPT_SEQUENCE
//
// The server counts the nodes that a folder has had, and appends the number. A claim depends only on nodes with smaller
// numbers. They were there before it, so every server that shows the node of the claim has seen them, and none is ever
// added: what a server shows may be old, but then only shows too many.

// folders of a kind of object.
const (
	locks      = "locks"
	semaphores = "semaphores"
)

// The first parts of the names of nodes.
const (
	write  = "write"
	read   = "read"
	permit = "permit"
)

// maxName is the length in bytes of the longest name. A name is part of the paths of its nodes, which each answer about
// them lists.
const maxName = 1024

// maxSequence is the largest number that is taken. The counter of a folder is an int32, and stands still at its end.
// Numbers are not unique then, so the last million of requests before that fail.
const maxSequence = math.MaxInt32 - 1_000_000

func checkName(name string) error {
	if name == "" {
		return fmt.Errorf("%w: the name is empty", lock.ErrInvalid)
	}
	if len(name) > maxName {
		return fmt.Errorf("%w: the name has %d bytes: at most %d", lock.ErrInvalid, len(name), maxName)
	}
	return nil
}

// folder returns the path of the nodes for a request, below a prefix.
func folder(prefix string, r *driver.Request) string {
	kind := locks
	if r.Permits > 0 {
		kind = semaphores
	}
	return prefix + "/" + kind + "/" + escape(r.Name)
}

// escape returns a name as one part of a path. ZooKeeper has no escapes of its own, and refuses control characters, the
// names "." and "..", and some others. Different names stay different.
func escape(name string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	onlyDots := strings.Trim(name, ".") == ""
	for i, r := range name {
		size := 1
		if r != utf8.RuneError {
			size = utf8.RuneLen(r)
		} else if strings.HasPrefix(name[i:], string(utf8.RuneError)) {
			size = utf8.RuneLen(utf8.RuneError)
		}

		if isPlain(r) && !(onlyDots && i == 0) {
			b.WriteRune(r)
			continue
		}
		for _, c := range []byte(name[i : i+size]) {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&0xF])
		}
	}
	return b.String()
}

// isPlain reports whether a character of a name stands for itself.
func isPlain(r rune) bool {
	return r > ' ' && r < 0x7F && r != '/' && r != '%' || r >= 0xA0 && r < 0xD800
}

// nodeName returns the name of a node for a request, without its number. No other attempt has that name.
func nodeName(r *driver.Request, attempt int) string {
	kind := write
	if r.Permits > 0 {
		kind = permit
	} else if r.Shared {
		kind = read
	}
	return fmt.Sprintf("%s_%s_%d_", kind, r.Owner, attempt)
}

// place is a node in a queue.
type place struct {
	name     string
	sequence int
}

// parse returns the place of a node, and false if the node is none of this package.
func parse(name string) (place, bool) {
	i := strings.LastIndexByte(name, '_')
	kind, _, _ := strings.Cut(name, "_")
	if i < 0 || kind != write && kind != read && kind != permit {
		return place{}, false
	}
	n, err := strconv.ParseInt(name[i+1:], 10, 32)
	if err != nil {
		return place{}, false
	}
	return place{name, int(n)}, true
}

// ahead returns the nodes, among the children of a folder, that a request with that node depends on, in the order of
// their numbers, and whether the node itself is there.
func ahead(children []string, own place, r *driver.Request) (others []place, present bool) {
	for _, name := range children {
		p, ok := parse(name)
		if name == own.name {
			present = true
		} else if ok && p.sequence < own.sequence && !(r.Shared && strings.HasPrefix(name, read)) {
			others = append(others, p)
		}
	}
	slices.SortFunc(others, func(a, b place) int { return cmp.Compare(a.sequence, b.sequence) })
	return others, present
}

// blocking returns the nodes ahead that a request has to watch: one of them goes away before it is granted.
// There are none if it is granted.
//
// A permit is granted when fewer nodes are ahead than there are permits. As long as as many of them are there as there
// are permits, it is not, whichever they are; the last ones are those that the fewest others watch.
func blocking(others []place, r *driver.Request) []place {
	n := max(1, r.Permits)
	if len(others) < n {
		return nil
	}
	return slices.Clone(others[len(others)-n:])
}
