package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/rueidis"
)

// network makes the connections of a client. It records the keys of the client's requests, and can
// close the connections or refuse subscriptions.
type network struct {
	keys *keyring
	deaf bool

	mu    sync.Mutex
	links map[*link]struct{}
}

// dialer is the type of rueidis.ClientOption.DialCtxFn.
type dialer = func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (net.Conn, error)

// dial returns a dialer that uses another one, or TCP if that is nil.
func (n *network) dial(inner dialer) dialer {
	if inner == nil {
		inner = func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (net.Conn, error) {
			if conf != nil {
				return (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", addr)
			}
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	return func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (net.Conn, error) {
		conn, err := inner(ctx, addr, d, conf)
		if err != nil {
			return nil, err
		}
		l := &link{Conn: conn, network: n}
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.links == nil {
			n.links = map[*link]struct{}{}
		}
		n.links[l] = struct{}{}
		return l, nil
	}
}

// cut closes all connections.
func (n *network) cut() {
	n.mu.Lock()
	links := slices.Collect(maps.Keys(n.links))
	n.mu.Unlock()
	for _, l := range links {
		_ = l.Close()
	}
}

// link is a connection of a network.
type link struct {
	net.Conn
	network *network
}

var errDeaf = errors.New("this client does not subscribe")

// Write implements net.Conn.
func (l *link) Write(b []byte) (int, error) {
	subscribes := l.network.keys.record(b)
	if subscribes && l.network.deaf {
		return 0, errDeaf
	}
	return l.Conn.Write(b)
}

// Close implements net.Conn.
func (l *link) Close() error {
	l.network.mu.Lock()
	delete(l.network.links, l)
	l.network.mu.Unlock()
	return l.Conn.Close()
}

// keyring records keys. SCAN would find them too, but it takes long on a large server, and needs a right
// that no object needs.
type keyring struct {
	mu             sync.Mutex
	keys           map[string]struct{}
	sharded, plain bool // subscriptions
}

// record records the keys of requests, and reports whether one subscribes. Requests are not split: the
// buffer of the driver is larger than all that verify sends at once.
func (k *keyring) record(requests []byte) (subscribes bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys == nil {
		k.keys = map[string]struct{}{}
	}
	lines := bytes.Split(requests, []byte("\r\n")) // each word follows its length
	word := func(i int) string {
		if i < len(lines) {
			return string(lines[i])
		}
		return ""
	}
	for i := range lines {
		switch string(lines[i]) {
		case "SSUBSCRIBE":
			k.sharded, subscribes = true, true
		case "SUBSCRIBE":
			k.plain, subscribes = true, true
		case "SET":
			k.keys[word(i+2)] = struct{}{}
		case "EVALSHA", "EVAL":
			n, _ := strconv.Atoi(word(i + 4))
			for j := range n {
				k.keys[word(i+6+2*j)] = struct{}{}
			}
		}
	}
	return subscribes
}

// pubSub returns the kind of pub/sub of the clients.
func (k *keyring) pubSub() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.sharded:
		return "sharded"
	case k.plain:
		return "plain"
	}
	return "no"
}

// remove deletes the keys that contain scratch, and returns those that may be left.
func (k *keyring) remove(ctx context.Context, conn rueidis.Client, scratch string) (left []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var keys []string
	var deletions rueidis.Commands
	for _, key := range slices.Sorted(maps.Keys(k.keys)) {
		if strings.Contains(key, scratch) {
			keys = append(keys, key)
			deletions = append(deletions, conn.B().Del().Key(key).Build())
		}
	}
	for i, reply := range conn.DoMulti(ctx, deletions...) {
		if err := reply.Error(); err != nil && !isForbiddenKey(err) {
			left = append(left, keys[i])
		}
	}
	return left
}

// isForbiddenKey reports whether a user may not access a key, so that no request of this user has
// written it.
func isForbiddenKey(err error) bool {
	reply, ok := rueidis.IsRedisErr(err)
	return ok && strings.HasPrefix(reply.Error(), "NOPERM") && strings.Contains(reply.Error(), "access")
}

// warnings keeps the last refusal of a subscription that a client has logged.
type warnings struct {
	mu      sync.Mutex
	refusal string
}

func (w *warnings) logger() *slog.Logger { return slog.New(w) }

// lastRefusal returns the refusal, "" if there is none.
func (w *warnings) lastRefusal() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refusal
}

// Enabled implements slog.Handler.
func (w *warnings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

// Handle implements slog.Handler.
func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "subscription refused") {
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "error" {
				w.mu.Lock()
				w.refusal = a.Value.String()
				w.mu.Unlock()
			}
			return true
		})
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (w *warnings) WithAttrs([]slog.Attr) slog.Handler { return w }

// WithGroup implements slog.Handler.
func (w *warnings) WithGroup(string) slog.Handler { return w }
