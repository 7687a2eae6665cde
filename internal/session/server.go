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

// Server is what tells the servers of several clients apart.
type Server struct {
	// ID is the run id of a server, or of a cluster the least of its nodes. All who ask
	// get the same, until the server is restarted or another takes its place.
	ID string
	// Database is the number of the one that the client uses.
	Database string
}

// identity is what is known of the server, nothing if it does not tell, and since when.
type identity struct {
	server Server
	asked  time.Time
}

// identityLife is for how long that is taken to be right. After it somebody asks again,
// and the others go on with what is known.
const identityLife = time.Minute

// Server returns which server the client talks to, the zero Server if that one does not
// tell. If it has not been asked yet it blocks for a round trip or two.
func (s *Session) Server(ctx context.Context) (Server, error) {
	if s.identity.Load() != nil {
		return s.KnownServer(), nil
	}
	return s.ask(ctx)
}

// AskedServer reports whether the server has said who it is, or that it does not tell.
func (s *Session) AskedServer() bool { return s.identity.Load() != nil }

func (s *Session) ask(ctx context.Context) (Server, error) {
	asked := time.Now()
	server, err := s.askServer(ctx)
	if refused := (*rueidis.RedisError)(nil); errors.As(err, &refused) {
		s.identity.CompareAndSwap(nil, &identity{asked: asked}) // it would say so again
	}
	if err != nil {
		return Server{}, fmt.Errorf("redlatch: ask the server who it is: %w", err)
	}
	s.identity.Store(&identity{server, asked})
	return server, nil
}

// KnownServer returns what is known without asking, the zero Server if that is nothing. If
// it is old, it is asked for in the background.
func (s *Session) KnownServer() Server {
	known := s.identity.Load()
	if known == nil {
		return Server{}
	}
	if time.Since(known.asked) >= identityLife {
		again := &identity{known.server, time.Now()}
		if s.identity.CompareAndSwap(known, again) { // nobody else does
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

// markLife is for how long a server keeps its mark after somebody has looked at it.
const markLife = 2 * identityLife

// markServer returns the mark of a server that does not tell its run id, and leaves one
// if there is none. why is the error of asking for the id.
func (s *Session) markServer(ctx context.Context, why error) (string, error) {
	if _, refused := rueidis.IsRedisErr(why); why != nil && !refused {
		return "", why
	}
	b := s.Client.B()
	set := b.Set().Key(wire.ServerMark).Value(uuid.NewString()).Nx().Px(markLife).Build()
	if err := s.Client.Do(wire.Shared(ctx), set).Error(); err != nil && !rueidis.IsRedisNil(err) {
		return "", errors.Join(err, why)
	}
	return s.Client.Do(wire.Shared(ctx), b.Getex().Key(wire.ServerMark).Px(markLife).Build()).ToString()
}

// field returns what follows a name in the list that a server answers.
func field(list, separator, name string) string {
	for entry := range strings.SplitSeq(list, separator) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(entry), name); ok {
			return value
		}
	}
	return ""
}

// leastNode returns the least of the nodes in the reply of CLUSTER SLOTS: for each range
// its bounds, and then address, port and id of each node. The address counts too, for the
// sake of servers that play a cluster and all have one id.
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
			host, _ := about[0].ToString() // none where the server does not know its own
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
