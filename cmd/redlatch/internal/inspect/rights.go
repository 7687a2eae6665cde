package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// NameDenied adds to the error of a request about an object which of its keys the user may not access: the
// server's error does not name them. It returns other errors as they are, and nil for nil. The request was one
// of Read, or of a client for an object of that kind. NameDenied blocks for replies only if the server has denied
// the request.
func (r *Reader) NameDenied(ctx context.Context, err error, kind Kind, names ...string) error {
	if err == nil || !wire.IsDenied(err) {
		return err
	}

	var denied []string
	for _, name := range names {
		denied = append(denied, r.denied(ctx, keysOfKind(keyOf(r.Prefix, name), kind))...)
	}
	const shown = 3
	n := len(denied)
	if n == 0 {
		return err
	}
	if n == 1 {
		return fmt.Errorf("%w: the user may not access the key %s", err, denied[0])
	}
	if n <= shown {
		return fmt.Errorf("%w: the user may not access the keys %s", err, strings.Join(denied, ", "))
	}
	return fmt.Errorf("%w: the user may not access the keys %s and %d more", err, strings.Join(denied[:shown], ", "), n-shown)
}

// ofRead is the kind of any object, of which Read reads the keys of all kinds.
const ofRead Kind = ""

// keysOfKind returns the keys that requests about an object use. An asterisk stands for the ids at the end of some.
func keysOfKind(key string, kind Kind) []string {
	if work, slot, ok := SlotOf(key); ok && kind == Once {
		return []string{key, wire.OnceDone(work, slot)}
	}
	if kind == ofRead {
		return keysOf(key)
	}

	keys := []string{key}
	for _, form := range wire.Forms {
		if form.Type == "" || !slices.Contains(form.Kinds, string(kind)) {
			continue
		}
		if form.Rest != "" {
			keys = append(keys, form.Of(key)+"*")
		} else {
			keys = append(keys, form.Of(key))
		}
	}
	return keys
}

// denied returns the keys that the user may not use in scripts, and none if the user may not run scripts.
func (r *Reader) denied(ctx context.Context, keys []string) (denied []string) {
	const nothing = "return 0"
	if r.Conn.Do(ctx, r.Conn.B().Eval().Script(nothing).Numkeys(0).Build()).Error() != nil {
		return nil
	}
	var tries rueidis.Commands
	for _, key := range keys {
		tries = append(tries, r.Conn.B().Eval().Script(nothing).Numkeys(1).Key(key).Build())
	}
	for i, reply := range r.Conn.DoMulti(ctx, tries...) {
		if err := reply.Error(); err != nil && wire.IsDenied(err) {
			denied = append(denied, keys[i])
		}
	}
	return denied
}
