package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Server identifies a server and a database, to compare the servers of several clients.
type Server struct {
	// ID is the run id of the server, or for a cluster the smallest of its nodes. It is
	// the same for all clients until the server restarts or is replaced.
	ID string
	// Database is the number of the client's database.
	Database string
}

// identity is a cached Server, zero if the server does not identify itself.
type identity struct {
	server Server
	asked  time.Time
}

// identityTTL is the age at which an identity is refreshed in the background.
const identityTTL = time.Minute

// Server identifies the client's server; it returns the zero Server if that does not
// identify itself. The first call blocks for one or two round trips.
func (s *Session) Server(ctx context.Context) (Server, error) {
	if s.AskedServer() {
		return s.KnownServer(), nil
	}
	return s.ask(ctx)
}

// AwaitServer reports, once, that the server is not identified yet: it may be the server of another client.
// So the majority of a Redlock awaits its answer.
func (s *Session) AwaitServer() bool { return !s.AskedServer() && !s.serverAwaited.Swap(true) }

// AskedServer reports whether the identity, or its absence, is known.
func (s *Session) AskedServer() bool { return s.identity.Load() != nil }

func (s *Session) ask(ctx context.Context) (Server, error) {
	asked := time.Now()
	server, err := s.identify(wire.Shared(ctx))
	if err == nil {
		s.identity.Store(&identity{server, asked})
		return server, nil
	}
	if errors.As(err, new(*rueidis.RedisError)) {
		s.identity.CompareAndSwap(nil, &identity{asked: asked}) // asking again would fail again
	}
	return Server{}, fmt.Errorf("redlatch: identify the server: %w", err)
}

// KnownServer returns the cached identity, zero if there is none. It refreshes an old
// one in the background.
func (s *Session) KnownServer() Server {
	known := s.identity.Load()
	if known == nil {
		return Server{}
	}
	if time.Since(known.asked) >= identityTTL {
		again := &identity{known.server, time.Now()}
		if s.identity.CompareAndSwap(known, again) { // only one caller refreshes
			s.Go(func(ctx context.Context) { _, _ = s.ask(ctx) })
		}
	}

	return known.server
}

// process is the last process of the server that Since has seen.
type process struct {
	mu       sync.Mutex
	runID    string
	replaced time.Time // when it was seen to have replaced another
}

// Since asks the server when it started, and returns that time, or a later one when the client
// noticed that one process had replaced another. If the server does not say, the error matches
// lock.ErrUnsupported. It blocks for one round trip.
func (s *Session) Since(ctx context.Context) (time.Time, error) {
	runID, uptime, err := s.info(ctx)
	if noReply(err) {
		return time.Time{}, fmt.Errorf("redlatch: ask for the server's uptime: %w", err)
	}

	seconds, convErr := strconv.ParseInt(uptime, 10, 64)
	if err := cmp.Or(err, convErr); err != nil || runID == "" || s.Cluster() {
		return time.Time{}, fmt.Errorf("%w: the server does not tell its uptime: %v", lock.ErrUnsupported, err)
	}

	now := time.Now()
	p := &s.process
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.runID != "" && p.runID != runID {
		p.replaced = now
	}
	p.runID = runID
	if started := now.Add(-time.Duration(seconds) * time.Second); started.After(p.replaced) {
		return started, nil
	}

	return p.replaced, nil
}

func (s *Session) identify(ctx context.Context) (Server, error) {
	b := s.Client.B()
	if s.Cluster() {
		nodes, err := s.Client.Do(ctx, b.ClusterSlots().Build()).ToArray()
		if err != nil {
			return Server{}, err
		}
		id, err := leastNode(nodes)
		return Server{ID: id, Database: "0"}, err
	}

	id, _, err := s.info(ctx)
	if noReply(err) {
		return Server{}, err
	}
	if id == "" {
		var markErr error
		if id, markErr = s.markServer(ctx); markErr != nil {
			return Server{}, errors.Join(markErr, err)
		}
	}

	client, err := s.Client.Do(ctx, b.ClientInfo().Build()).ToString()
	if noReply(err) {
		return Server{}, err
	}

	return Server{ID: id, Database: field(client, " ", "db=")}, nil
}

// info returns what the server says of itself, empty strings if it does not.
func (s *Session) info(ctx context.Context) (runID, uptime string, err error) {
	info, err := s.Client.Do(ctx, s.Client.B().Info().Section("server").Build()).ToString()
	return field(info, "\n", "run_id:"), field(info, "\n", "uptime_in_seconds:"), err
}

// noReply reports whether err is an error other than the server's.
func noReply(err error) bool {
	_, reply := rueidis.IsRedisErr(err)
	return err != nil && !reply
}

// markTTL is the time to live of a server's mark after each use.
const markTTL = 2 * identityTTL

// markServer returns the mark of a server that hides its run id, and creates it if needed.
func (s *Session) markServer(ctx context.Context) (string, error) {
	b := s.Client.B()
	set := b.Set().Key(wire.ServerMark).Value(uuid.NewString()).Nx().Px(markTTL).Build()
	if err := s.Client.Do(ctx, set).Error(); err != nil && !rueidis.IsRedisNil(err) {
		return "", err
	}
	return s.Client.Do(ctx, b.Getex().Key(wire.ServerMark).Px(markTTL).Build()).ToString()
}

// field returns the value of a name in a list from the server.
func field(list, separator, name string) string {
	for entry := range strings.SplitSeq(list, separator) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(entry), name); ok {
			return value
		}
	}
	return ""
}

// leastNode returns the smallest node in a reply to CLUSTER SLOTS, which lists for each
// range its bounds and then address, port and id of each node. It includes the address
// because emulated clusters may use one id for all nodes.
func leastNode(ranges []rueidis.RedisMessage) (string, error) {
	var nodes []string
	for _, r := range ranges {
		parts, _ := r.ToArray()
		for _, node := range parts[min(2, len(parts)):] {
			about, _ := node.ToArray()
			if len(about) < 3 {
				continue
			}
			host, _ := about[0].ToString() // empty if the node does not know it
			port, _ := about[1].AsInt64()
			if id, err := about[2].ToString(); err == nil {
				nodes = append(nodes, fmt.Sprintf("%s@%s:%d", id, host, port))
			}
		}
	}

	if len(nodes) == 0 {
		return "", errors.New("no node is known")
	}

	return slices.Min(nodes), nil
}
