package contract_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

func TestEveryKindInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		of := func(name string) string { return cluster.Owner(name).Addr }
		modes := harness.PubSubModes(t, cluster)
		for _, mode := range modes[:harness.Size(1, len(modes))] {
			t.Run(mode.String(), func(t *testing.T) {
				here := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				there := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				for _, k := range kinds {
					for i := range harness.Size(2, 6) { // in the end enough names for every primary to have some
						for _, roles := range k.roles() {
							name := fmt.Sprint(roles.name, "-", i)
							k.prepare(t, of(name), name)
							wokenByMessage(t, k, cluster, there, name, roles.held(here, name), roles.waits(there, name), k.owners(t, here))
							k.unmake(t, of(name), name)
						}
					}
				}
			})
		}
		t.Run("names", func(t *testing.T) {
			c := harness.ClientAt(t, cluster.Addrs())
			for _, k := range kinds {
				for _, name := range unslotted {
					require.ErrorIs(t, only(k.of(c, name).TryLock(t.Context())), lock.ErrInvalid, "%s %s", k.name, name)
				}
			}
			require.ErrorIs(t, only(c.Probe(t.Context(), unslotted[0])), lock.ErrInvalid)
		})
		t.Run("renewed", func(t *testing.T) {
			const timeout = 6 * time.Second // a busy machine has that much time to spare
			c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithWatchdogTimeout(timeout))
			var holds []lock.Hold
			var undo []func()
			for _, k := range choose(leased) {
				for i := range harness.Size(2, 10) {
					name := fmt.Sprint("renewed ", k.name, " ", i)
					k.prepare(t, of(name), name)
					undo = append(undo, func() { k.unmake(t, of(name), name) })
					holds = append(holds, k.holdAll(t, c, []string{name})...)
				}
			}
			<-time.After(timeout + timeout/2)
			isReleased(t, holds)
			for _, f := range undo {
				f()
			}
		})
		onlyRequestsLeft(t, cluster, "*")
	})
}

// wokenByMessage has a waiter there get what is released here. The lease is no help.
func wokenByMessage(t *testing.T, k kind, cluster *testserver.Cluster, there *redlatch.Client, name string, ours, theirs lock.Locker,
	owners map[string]context.Context) {
	t.Helper()
	hasChannel := func() bool {
		return slices.ContainsFunc(cluster.Addrs(), func(addr string) bool {
			return slices.ContainsFunc([]string{"CHANNELS", "SHARDCHANNELS"}, func(kind string) bool {
				channels, err := testserver.Command(addr, "PUBSUB", kind, "*"+name+"*")
				require.NoError(t, err)
				return channels != "*0" && !strings.HasPrefix(channels, "-") // before 7.0 no channel is sharded
			})
		})
	}
	for what, ctx := range owners {
		h := mustLock(t, ctx, ours, k.long()...)
		isTaken(t, theirs)
		waiterCtx := context.Background()
		if what == "named" {
			waiterCtx = lock.WithOwner(waiterCtx, there.NewOwner())
		}
		before := there.Stats().PubSub
		waited := async(func() error { return theirs.Do(waiterCtx, nothing) })
		harness.Eventually(t, soon, "the waiter listens", func() bool {
			return k.waiting(1, there) && (k.polls || hasChannel())
		})
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, ends(t, waited, soon))
		if !k.polls {
			require.Less(t, time.Since(begin), 3*time.Second, "woken by the safety poll")
			// Who polls beside messages may have been quicker than this one.
			harness.Eventually(t, soon, "the message", func() bool { return there.Stats().PubSub.Messages > before.Messages })
		}
	}
}

// A slot moves to another node, key by key and in every order. At each step the object is
// unlocked, locked, or left by a waiter. Whatever keys are on either side then, nothing is lost:
// no hold and no permit, and nobody gets in beside a holder.
func TestASlotMovesKeyByKey(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		slots := sharedSlots(t, shared.Program)
		for _, k := range kinds {
			t.Run(k.name, func(t *testing.T) {
				t.Parallel()
				x := newMovingKind(t, slots, k)
				t.Run("unlocked", func(t *testing.T) { x.inEveryOrder(t, x.unlockedFor(x.there)) })
				t.Run("passed on", func(t *testing.T) { x.inEveryOrder(t, x.unlockedFor(x.here)) })
				t.Run("locked", func(t *testing.T) { x.inEveryOrder(t, x.locked) })
				t.Run("left", func(t *testing.T) { x.inEveryOrder(t, x.left) })
			})
		}
	})
}

// slotNames makes names that have slots of their own.
type slotNames struct {
	cluster *testserver.Cluster
	mu      sync.Mutex
	used    map[int]bool
	n       int
}

// clusters are those of sharedSlots, by program.
var clusters sync.Map

// sharedSlots returns the slots of a cluster for all tests that move some of their own to the last primary.
func sharedSlots(t testing.TB, program string) *slotNames {
	t.Helper()
	start, _ := clusters.LoadOrStore(program, sync.OnceValues(func() (*slotNames, error) {
		c, err := testserver.StartCluster(program, 3, false, 15*time.Second) // see harness.Cluster
		if err == nil {
			harness.Finally(c.Stop)
		}
		return &slotNames{cluster: c, used: make(map[int]bool)}, err
	}))
	s, err := start.(func() (*slotNames, error))()
	require.NoError(t, err)
	return s
}

// next returns a name whose slot can move to the last primary.
func (s *slotNames) next(format string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		s.n++
		name := fmt.Sprintf(format, s.n)
		if slot := wire.Slot(name); !s.used[slot] && s.cluster.Owner(name) != s.cluster.Primaries[2] {
			s.used[slot] = true
			return name
		}
	}
}

// movingKind is a kind of object whose slots move.
type movingKind struct {
	kind
	names              *slotNames
	conn               *countedConn // of here
	here, there, third *redlatch.Client
}

func newMovingKind(t *testing.T, names *slotNames, k kind) *movingKind {
	cluster := names.cluster
	x := &movingKind{kind: k, names: names}
	x.conn = &countedConn{Client: harness.ConnAt(t, cluster.Addrs())}
	// A message in sharded mode can get lost with its slot.
	plain := redlatch.WithPubSubMode(pubsub.Plain)
	var err error
	x.here, err = redlatch.Wrap(t.Context(), x.conn, plain, quiet)
	require.NoError(t, err)
	t.Cleanup(x.here.Close)
	x.there = harness.ClientAt(t, cluster.Addrs(), plain, quiet)
	x.third = harness.ClientAt(t, cluster.Addrs(), plain, quiet)
	return x
}

// countedConn counts the replies.
type countedConn struct {
	rueidis.Client
	replies atomic.Int64
}

func (c *countedConn) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	defer c.replies.Add(1)
	return c.Client.Do(ctx, cmd)
}

// asked makes a call of here in the background, and returns when the server has replied to
// its first request.
func (x *movingKind) asked(t *testing.T, call func() error) <-chan error {
	t.Helper()
	before := x.conn.replies.Load()
	done := async(call)
	harness.Eventually(t, soon, "a reply", func() bool { return len(done) > 0 || x.conn.replies.Load() > before })
	return done
}

// inOneSlot returns a format of names, such that all keys of an object share a slot.
func (k kind) inOneSlot() string {
	if k.name == "multi" {
		return "{multi %d}"
	}
	return k.name + " %d"
}

// newObject returns an object that was not used before.
func (x *movingKind) newObject(n int) *movingObject {
	return &movingObject{name: x.names.next(x.inOneSlot()), n: n}
}

func (x *movingKind) addr(name string) string { return x.names.cluster.Owner(name).Addr }

// inEveryOrder runs a test for each order in which the keys can move, and for each number of keys
// that have moved when something happens, or for some of these cases.
func (x *movingKind) inEveryOrder(t *testing.T, test func(t *testing.T, m *movingObject)) {
	most := harness.Size(1, 24)
	first := rand.IntN(1000) * most
	for n, cases := 0, most; n < min(most, cases); n++ {
		m := x.newObject(first + n)
		x.create(t, m)
		test(t, m)
		if t.Failed() {
			t.Fatalf("case %d: the keys move in the order %q, and something happens after %d", m.n, m.order, m.at)
		}
		cases = m.cases
		x.unmake(t, x.addr(m.name), m.name)
		onlyRequestsLeft(t, x.names.cluster, "*"+m.name+"*")
	}
}

// onlyRequestsLeft fails the test unless soon no keys that match are left but the cached replies of
// semaphores.
func onlyRequestsLeft(t *testing.T, cluster *testserver.Cluster, match string) {
	t.Helper()
	for _, node := range cluster.Primaries {
		harness.Eventually(t, 2*soon, "no key is left but those of requests", func() bool {
			keys, err := testserver.Query(node.Addr, "KEYS", match)
			require.NoError(t, err)
			return !slices.ContainsFunc(keys, func(key string) bool { return !strings.HasPrefix(key, "redlatch_sc_request") })
		})
	}
}

// movingObject is an object whose slot moves.
type movingObject struct {
	name   string
	n      int // of the case
	cases  int
	order  []string
	at     int          // number of keys that have moved when something happens
	inside atomic.Int32 // holders
}

// choose sets order and at.
func (m *movingObject) choose(keys []string) {
	slices.Sort(keys)
	m.cases = len(keys) + 1
	m.at = m.n % m.cases
	for n := m.n / m.cases; len(keys) > 0; {
		m.cases *= len(keys)
		i := n % len(keys)
		n /= len(keys)
		m.order = append(m.order, keys[i])
		keys = slices.Delete(keys, i, i+1)
	}
}

// move moves the slot of an object. It calls before at each step until something happens, which
// is what then does. The caller finishes the move.
func (x *movingKind) move(t *testing.T, m *movingObject, before, then func()) *testserver.Move {
	t.Helper()
	move, err := x.names.cluster.BeginMove(m.name)
	require.NoError(t, err)
	keys, err := move.Keys()
	require.NoError(t, err)
	m.choose(keys)
	for i := range len(m.order) + 1 {
		if i < m.at {
			before()
		} else if i == m.at {
			before()
			then()
		}
		if i < len(m.order) {
			require.NoError(t, move.Migrate(m.order[i]), m.order[i])
		}
	}
	require.NoError(t, move.MigrateAll())
	return move
}

// create is prepare, but without doubt about the age of a semaphore.
func (x *movingKind) create(t *testing.T, m *movingObject) {
	t.Helper()
	created, err := true, error(nil)
	switch x.name {
	case "semaphore":
		created, err = x.here.Semaphore(m.name).TrySetPermits(t.Context(), 1)
	case "permit semaphore":
		created, err = x.here.PermitSemaphore(m.name).TrySetPermits(t.Context(), 1)
	}
	require.NoError(t, err)
	require.True(t, created)
}

// hold has a client get the object.
func (x *movingKind) hold(t *testing.T, m *movingObject, c *redlatch.Client) lock.Hold {
	t.Helper()
	h := mustLock(t, t.Context(), x.of(c, m.name))
	m.inside.Add(1)
	return h
}

// unlock ends a hold.
func (m *movingObject) unlock(h lock.Hold) error {
	m.inside.Add(-1)
	return h.Unlock(context.Background())
}

// wait has a client wait for what nobody else may have at the same time, and returns when it
// waits.
func (x *movingKind) wait(t *testing.T, ctx context.Context, m *movingObject, c *redlatch.Client, in func(),
) <-chan error {
	t.Helper()
	waited := async(func() error {
		return x.rival(c, m.name).Do(ctx, func(context.Context) error {
			defer m.inside.Add(-1)
			if m.inside.Add(1) != 1 {
				return errors.New("others are inside")
			}
			in()
			return nil
		})
	})
	harness.Eventually(t, soon, "it waits", func() bool { return x.waiting(1, c) })
	if x.free == "1" && x.poll == linePoll {
		harness.Eventually(t, soon, "its queue position", func() bool {
			return harness.Do(t, x.addr(m.name), "EXISTS", "redlatch_sc_waiting:{"+m.name+"}") == ":1"
		})
	}
	return waited
}

// stands fails the test unless these holds are kept, and keep others out.
func (x *movingKind) stands(t *testing.T, m *movingObject, holds []lock.Hold) {
	t.Helper()
	for _, h := range holds {
		if x.leased {
			if err := h.Extend(t.Context(), time.Hour); err != nil {
				require.NotErrorIs(t, err, lock.ErrLost)
			}
			require.NoError(t, h.Context().Err())
		}
	}
	if x.name != "latch" { // which tries for 5 s
		_, err := x.rival(x.third, m.name).TryLock(t.Context())
		require.Error(t, err)
	}
}

// unlockedFor returns a test that unlocks while the slot moves, and callers wait, the first of that
// client.
func (x *movingKind) unlockedFor(c *redlatch.Client) func(t *testing.T, m *movingObject) {
	return func(t *testing.T, m *movingObject) { x.unlocked(t, m, c) }
}

func (x *movingKind) unlocked(t *testing.T, m *movingObject, c *redlatch.Client) {
	var holds []lock.Hold
	switch {
	case x.shared:
		holds = append(holds, x.hold(t, m, x.here), x.hold(t, m, x.there))
	case x.name == "write": // and goes on as a reader
		owner := lock.WithOwner(t.Context(), x.here.NewOwner())
		holds = append(holds, mustLock(t, owner, writing(x.here, m.name)), mustLock(t, owner, reading(x.here, m.name)))
		m.inside.Add(2)
	default:
		holds = append(holds, x.hold(t, m, x.here))
	}
	var order []string
	first := x.wait(t, context.Background(), m, c, func() { order = append(order, "first") })
	second := x.wait(t, context.Background(), m, x.third, func() { order = append(order, "second") })
	var unlocked <-chan error
	move := x.move(t, m, func() { x.stands(t, m, holds) }, func() {
		h := holds[0]
		holds = holds[1:]
		unlocked = x.asked(t, func() error { return m.unlock(h) })
	})
	if slices.Contains([]string{"fair", "non-reentrant fair", "read", "write", "semaphore", "permit semaphore"}, x.name) {
		require.Empty(t, unlocked, "unlocked while the slot moves")
	}
	require.NoError(t, move.Finish())
	require.NoError(t, ends(t, unlocked, soon))
	for _, h := range holds {
		x.stands(t, m, holds)
		require.NoError(t, m.unlock(h))
	}
	require.NoError(t, ends(t, first, soon))
	require.NoError(t, ends(t, second, soon))
	if strings.Contains(x.name, "fair") {
		require.Equal(t, []string{"first", "second"}, order)
	}
}

// locked locks a free object while the slot moves.
func (x *movingKind) locked(t *testing.T, m *movingObject) {
	require.NoError(t, x.of(x.there, m.name).Do(t.Context(), nothing)) // some keys stay
	locked := make(chan lock.Hold, 1)
	var done <-chan error
	move := x.move(t, m, func() {}, func() {
		done = x.asked(t, func() error {
			h, err := x.of(x.here, m.name).Lock(context.Background())
			locked <- h
			return err
		})
	})
	require.NoError(t, move.Finish())
	require.NoError(t, ends(t, done, soon))
	m.inside.Add(1)
	h := <-locked
	x.stands(t, m, []lock.Hold{h})
	require.NoError(t, m.unlock(h))
}

// left has a waiter leave while the slot moves.
func (x *movingKind) left(t *testing.T, m *movingObject) {
	h := x.hold(t, m, x.there)
	ctx, leave := context.WithCancel(context.Background())
	first := x.wait(t, ctx, m, x.here, func() {})
	second := x.wait(t, context.Background(), m, x.third, func() {})
	move := x.move(t, m, func() { x.stands(t, m, []lock.Hold{h}) }, func() {
		_ = x.asked(t, func() error {
			leave()
			<-first
			return nil
		})
	})
	require.NoError(t, move.Finish())
	harness.Idle(t, x.here)
	require.NoError(t, m.unlock(h))
	require.NoError(t, ends(t, second, soon))
}

// A script that runs while a slot moves may fail halfway, unless it runs at rest only.
func TestAScriptWhileTheSlotMoves(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		slots := sharedSlots(t, shared.Program)
		conn, key := harness.ConnAt(t, slots.cluster.Addrs()), slots.next("{script %d}")
		node := slots.cluster.Owner(key).Addr
		harness.Do(t, node, "SET", key, "1")
		move, err := slots.cluster.BeginMove(key)
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
		require.NoError(t, move.Finish())
	})
}

// A lease whose keys are on either side cannot be renewed. No other lease in the slot ends with it.
func TestASplitLeaseEndsNoOther(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		const timeout = 3 * time.Second
		slots := sharedSlots(t, shared.Program)
		cluster, tag := slots.cluster, slots.next("{moving %d}")
		c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithWatchdogTimeout(timeout), quiet)
		split := mustLock(t, t.Context(), c.RWLock(tag+" split").Read())
		others := []lock.Hold{mustLock(t, t.Context(), c.Lock(tag+" moved"))}
		for i := range 3 {
			others = append(others, mustLock(t, t.Context(), c.RWLock(fmt.Sprint(tag, i)).Read()),
				mustLock(t, t.Context(), c.Lock(fmt.Sprint(tag, " lock ", i))))
		}
		move, err := cluster.BeginMove(tag + " split")
		require.NoError(t, err)
		require.NoError(t, move.Migrate(tag+" split"))
		require.NoError(t, move.Migrate(tag+" moved"))
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
		onlyRequestsLeft(t, cluster, "*"+tag+"*")
	})
}

// A writer reads while the slot moves and another writer of this process waits, for the writer.
func TestAWriterReadsWhileTheSlotMoves(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		slots := sharedSlots(t, shared.Program)
		x, name := newMovingKind(t, slots, ofKind("write")), slots.next("writer %d")
		owner := lock.WithOwner(t.Context(), x.here.NewOwner())
		writer := mustLock(t, owner, writing(x.here, name))
		waiter := x.waits(t, writing(x.here, name), x.here)
		move, err := slots.cluster.BeginMove(name)
		require.NoError(t, err)
		var reader lock.Hold
		read := x.asked(t, func() (err error) {
			reader, err = reading(x.here, name).Lock(owner)
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
		var uses atomic.Int64
		var callers sync.WaitGroup
		ctx, stop := context.WithCancel(context.Background())
		end := func() { stop(); callers.Wait() }
		defer end()
		names := make([]string, len(kinds))
		for i, k := range kinds {
			for n := 0; names[i] == "" || wire.Slot(names[i]) >= slots; n++ {
				names[i] = fmt.Sprintf(k.inOneSlot(), n)
			}
			k.prepare(t, cluster.Primaries[0].Addr, names[i])
			r := &room{k: k}
			for j, c := range clients {
				callers.Go(func() {
					for n := j; ctx.Err() == nil; n++ {
						of := k.of
						if n%4 == 0 {
							of = k.rival
						}
						assert.NoError(t, r.pass(t, of(c, names[i]), n%4 == 0), names[i])
						uses.Add(1)
					}
				})
			}
		}
		moves := []func(from, to *testserver.Server, n int) error{cluster.Reshard}
		if cluster.MigratesSlots() {
			moves = append(moves, cluster.MigrateSlots)
		}
		for _, move := range moves {
			for round := range rounds {
				before := uses.Load()
				require.NoError(t, move(cluster.Primaries[round%2], cluster.Primaries[1-round%2], slots))
				harness.Eventually(t, soon, "uses", func() bool { return uses.Load() >= before+100 })
			}
		}
		end()
		t.Logf("%d uses", uses.Load())
		for i, k := range kinds {
			k.unmake(t, cluster.Primaries[0].Addr, names[i])
		}
		onlyRequestsLeft(t, cluster, "*")
	})
}
