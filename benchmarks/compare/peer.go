package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sort"
	"strings"
)

// service is a client of a locking library.
type service interface {
	// operation returns the work of one goroutine on the object of that name.
	operation(ctx context.Context, t task, name string) (operation, error)
	close()
}

// operation is an acquisition and a release by one goroutine.
type operation interface {
	acquire(ctx context.Context) error
	release(ctx context.Context) error
}

// peers are the libraries by name.
var peers = map[string]func(ctx context.Context, addrs []string) (service, error){
	"floor":       openFloor,
	"redlatch":    openRedlatch,
	"wrapped":     openWrapped,
	"unlimited":   openUnlimited,
	"redsync":     openRedsync,
	"redislock":   openRedislock,
	"rueidislock": openRueidislock,
	"redis_rate":  openRedisRate,
	"x/time/rate": openLocalRate,
	"etcd":        openEtcd,
	"zookeeper":   openZookeeper,
	"postgres":    openPostgres,
	"mariadb":     openMariaDB,
	"etcdlock":    openEtcdlock,
	"zklock":      openZklock,
	"advisory":    openAdvisory,
	"rows":        openRows,
}

func open(ctx context.Context, t task) (service, error) {
	o, ok := peers[t.Peer]
	if !ok {
		var names []string
		for name := range peers {
			names = append(names, name)
		}
		sort.Strings(names)
		return nil, fmt.Errorf("unknown peer %q: known are %s", t.Peer, strings.Join(names, ", "))
	}
	addrs := t.Addrs
	if t.Trip > 0 {
		var err error
		if addrs, err = far(ctx, addrs, t.Trip); err != nil {
			return nil, err
		}
	}
	return o(ctx, addrs)
}

// unsupported reports that a library has no such object.
func unsupported(t task) error { return fmt.Errorf("%s has no %s", t.Peer, t.Kind) }

// writes reports whether an operation on a read-write lock is one of the t.Writes in a
// hundred.
func (t task) writes() bool { return rand.IntN(100) < t.Writes }
