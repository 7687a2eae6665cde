package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// Server identifies a server and a database, to compare those of several clients.
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
	if s.identity.Load() != nil {
		return s.KnownServer(), nil
	}
	return s.ask(ctx)
}

// AskedServer reports whether the identity, or its absence, is known.
func (s *Session) AskedServer() bool { return s.identity.Load() != nil }

func (s *Session) ask(ctx context.Context) (Server, error) {
	asked := time.Now()
	server, err := s.askServer(ctx)
	if refused := (*rueidis.RedisError)(nil); errors.As(err, &refused) {
		s.identity.CompareAndSwap(nil, &identity{asked: asked}) // asking again would fail again
	}
	if err != nil {
		return Server{}, fmt.Errorf("redlatch: identify the server: %w", err)
	}
	s.identity.Store(&identity{server, asked})
	return server, nil
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

func (s *Session) askServer(ctx context.Context) (Server, error) {
	ctx, cancel := s.Bounded(ctx)
	defer cancel()
	b := s.Client.B()
	if s.Cluster() {
		nodes, err := s.Client.Do(wire.Shared(ctx), b.ClusterSlots().Build()).ToArray()
		if err != nil {
			return Server{}, err
		}
		id, err := leastNode(nodes)
		return Server{ID: id, Database: "0"}, err
	}
	var server Server
	info, err := s.Client.Do(wire.Shared(ctx), b.Info().Section("server").Build()).ToString()
	if err == nil {
		server.ID = field(info, "\n", "run_id:")
	}
	if server.ID == "" {
		if server.ID, err = s.markServer(ctx, err); err != nil {
			return Server{}, err
		}
	}
	client, err := s.Client.Do(wire.Shared(ctx), b.ClientInfo().Build()).ToString()
	if _, refused := rueidis.IsRedisErr(err); err != nil && !refused {
		return Server{}, err
	}
	server.Database = field(client, " ", "db=")
	return server, nil
}

// markTTL is the time to live of a server's mark after each use.
const markTTL = 2 * identityTTL

// markServer returns the mark of a server that hides its run id, and creates it if
// needed. why is the error of the request for the run id.
func (s *Session) markServer(ctx context.Context, why error) (string, error) {
	if _, refused := rueidis.IsRedisErr(why); why != nil && !refused {
		return "", why
	}
	b := s.Client.B()
	set := b.Set().Key(wire.ServerMark).Value(uuid.NewString()).Nx().Px(markTTL).Build()
	if err := s.Client.Do(wire.Shared(ctx), set).Error(); err != nil && !rueidis.IsRedisNil(err) {
		return "", errors.Join(err, why)
	}
	return s.Client.Do(wire.Shared(ctx), b.Getex().Key(wire.ServerMark).Px(markTTL).Build()).ToString()
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
		parts, err := r.ToArray()
		if err != nil || len(parts) < 3 {
			continue
		}
		for _, node := range parts[2:] {
			about, err := node.ToArray()
			if err != nil || len(about) < 3 {
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
