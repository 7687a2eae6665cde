package contract_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// A script that runs while a slot moves may fail halfway, unless it runs at rest only.
func TestAScriptWhileTheSlotMoves(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn := harness.ConnAt(t, cluster.Addrs())
		const key = "{moving}"
		node := cluster.Owner(key).Addr
		harness.Do(t, node, "SET", key, "1")
		_, err := cluster.BeginMove(key)
		require.NoError(t, err)
		exec := func(s *wire.Script) error { return s.Exec(t.Context(), conn, []string{key}, nil).Error() }
		const source = "redis.call('DEL', KEYS[1]) return redis.call('EXISTS', KEYS[1])"
		err = exec(wire.NewScript(source).AtRest())
		require.True(t, wire.IsMoving(err), err)
		require.Equal(t, wire.Passing, wire.OutcomeOf(err))
		require.Equal(t, ":1", harness.Do(t, node, "EXISTS", key))
		err = exec(wire.NewScript(source))
		require.True(t, wire.IsMoving(err), err)
		require.Equal(t, wire.Unknown, wire.OutcomeOf(err))
	})
}

// A lease whose keys are on either side cannot be renewed. No other lease in the slot ends with it.
func TestASplitLeaseEndsNoOther(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		const timeout = 3 * time.Second
		cluster := harness.Cluster(t, shared.Program)
		c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithWatchdogTimeout(timeout), quiet)
		split := mustLock(t, t.Context(), c.RWLock("{moving} split").Read())
		others := []lock.Hold{mustLock(t, t.Context(), c.Lock("{moving} moved"))}
		for i := range 3 {
			others = append(others, mustLock(t, t.Context(), c.RWLock(fmt.Sprint("{moving} ", i)).Read()),
				mustLock(t, t.Context(), c.Lock(fmt.Sprint("{moving} lock ", i))))
		}
		move, err := cluster.BeginMove("{moving} split")
		require.NoError(t, err)
		require.NoError(t, move.Migrate("{moving} split"))
		require.NoError(t, move.Migrate("{moving} moved"))
		select {
		case <-split.Context().Done():
		case <-time.After(soon):
			require.FailNow(t, "the split lease was renewed")
		}
		<-time.After(timeout / 2) // the others do not end just after it, either
		for _, h := range others {
			require.NoError(t, context.Cause(h.Context()), h.Name())
		}
		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
		require.ErrorIs(t, split.Unlock(t.Context()), lock.ErrLost)
		for _, h := range others {
			if err := h.Unlock(t.Context()); err != nil { // on a busy machine the rest of the move outlasts a lease
				require.ErrorIs(t, err, lock.ErrLost, h.Name())
			}
		}
		for _, node := range cluster.Primaries {
			harness.NothingLeft(t, node.Addr)
		}
	})
}

// A writer reads while the slot moves and another writer of this process waits, for the writer.
func TestAWriterReadsWhileTheSlotMoves(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		x := newMovingKind(t, &slotNames{cluster: cluster}, ofKind("write"))
		owner := lock.WithOwner(t.Context(), x.here.NewOwner())
		writer := mustLock(t, owner, writing(x.here, "orders"))
		waiter := x.waits(t, writing(x.here, "orders"), x.here)
		move, err := cluster.BeginMove("orders")
		require.NoError(t, err)
		var reader lock.Hold
		read := x.asked(t, func() (err error) {
			reader, err = reading(x.here, "orders").Lock(owner)
			return err
		})
		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
		require.NoError(t, ends(t, read, soon))
		require.NoError(t, writer.Unlock(t.Context()))
		require.NoError(t, reader.Unlock(t.Context()))
		require.NoError(t, ends(t, waiter, soon))
	})
}

// Slots move back and forth, as operators move them, while their objects are used.
func TestReshardingUnderLoad(t *testing.T) {
	harness.Full(t)
	harness.EachBusy(t, func(t *testing.T, shared *testserver.Server) {
		const slots, rounds = 100, 6
		cluster := harness.Cluster(t, shared.Program)
		var clients []*redlatch.Client
		for range 3 {
			clients = append(clients, harness.ClientAt(t, cluster.Addrs(), quiet))
		}
		l := load{stop: make(chan struct{})}
		defer l.end()
		names := make([]string, len(kinds))
		for i, k := range kinds {
			for n := 0; names[i] == "" || wire.Slot(names[i]) >= slots; n++ {
				names[i] = fmt.Sprintf(k.inOneSlot(), n)
			}
			k.prepare(t, cluster.Primaries[0].Addr, names[i])
			l.begin(t, k, names[i], clients)
		}
		moves := []func(from, to *testserver.Server, n int) error{cluster.Reshard}
		if cluster.MigratesSlots() {
			moves = append(moves, cluster.MigrateSlots)
		}
		for _, move := range moves {
			for round := range rounds {
				before := l.uses.Load()
				require.NoError(t, move(cluster.Primaries[round%2], cluster.Primaries[1-round%2], slots))
				harness.Eventually(t, soon, "uses", func() bool { return l.uses.Load() >= before+100 })
			}
		}
		l.end()
		t.Logf("%d uses", l.uses.Load())
		for i, k := range kinds {
			k.unmake(t, cluster.Primaries[0].Addr, names[i])
		}
		onlyRequestsLeft(t, cluster, "*")
	})
}

// load is callers that use objects until end.
type load struct {
	stop    chan struct{}
	ended   sync.Once
	callers sync.WaitGroup
	uses    atomic.Int64
}

func (l *load) end() {
	l.ended.Do(func() { close(l.stop) })
	l.callers.Wait()
}

// begin has one caller of each client use an object, and every fourth time its rival.
func (l *load) begin(t *testing.T, k kind, name string, clients []*redlatch.Client) {
	var beside, alone atomic.Int32
	for i, c := range clients {
		l.callers.Go(func() {
			for n := i; ; n++ {
				select {
				case <-l.stop:
					return
				default:
				}
				o, shared := k.of(c, name), k.shared
				if n%4 == 0 {
					o, shared = k.rival(c, name), false
				}
				assert.NoError(t, o.Do(context.Background(), func(context.Context) error {
					inside := &alone
					if shared {
						inside = &beside
					}
					n := inside.Add(1)
					defer inside.Add(-1)
					assert.True(t, shared || n == 1 && beside.Load() == 0, "%s excludes others", name)
					l.uses.Add(1)
					return nil
				}), name)
			}
		})
	}
}
