package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redlatch/redlatch"
)

// scenario is a section of the report: cells, each measured for some peers.
type scenario struct {
	number int
	title  string
	about  string
	// measures are the columns of the tables of its cells, unless these have their own.
	measures []string
	// best is the measure that ranks the peers, and base the peer to which it compares the
	// others.
	best, base string
	cells      []cell
}

// cell is one situation.
type cell struct {
	name      string
	size      int // of goroutines or locks: the position on the axis of a plot
	task      task
	processes int
	// rival is the peer of the second half of the processes, which contend with the first, and trip how much
	// longer than usual a round trip to the server takes for them. The peer is the same if it is empty.
	rival   string
	trip    time.Duration
	servers int // how many; 0 is one
	peers   []string
	times   int // how often it is measured; 0 is as often as most
	// alone is a single goroutine, which mostly waits to be woken: how long that takes depends
	// on the machine and varies.
	alone bool
	// measures and best are set if they differ from those of the scenario.
	measures []string
	best     string
}

// redisPeers lock on the same server as redlatch, otherPeers on another: each store with its own recipe, and with
// redlatch.
var (
	redisPeers = []string{us, "redsync", "redislock", "rueidislock", redisson}
	otherPeers = []string{"etcd", onEtcd, "zookeeper", curator, onZookeeper, "postgres", onAdvisory, onRows, "mariadb"}
)

// manyPeers are the otherPeers that allow many contenders. A contender of any other needs a connection of its own.
var manyPeers = []string{"etcd", onEtcd, "zookeeper", curator, onZookeeper, onAdvisory, onRows}

// The columns of most tables.
var (
	costs     = []string{"client", "server", "commands", "allocs", "bytes"}
	latencies = []string{"rate", "p50", "p99", "p99.9"}
)

// variant is a peer under another name, with other settings.
type variant struct {
	peer       string
	background bool
	kind       string // of the object, if it differs
}

// The variants of the floor and of redlatch.
const (
	floorBackground   = "floor, Background"
	ourBackground     = us + ", Background"
	wrapped           = us + ", Wrap"
	wrappedBackground = us + ", Wrap, Background"
	ofThree           = us + ", multi-lock of 3"
	noLimit           = us + ", no limit"
	onEtcd            = us + ", etcd"
	onZookeeper       = us + ", zookeeper"
	onAdvisory        = us + ", postgres advisory"
	onRows            = us + ", postgres rows"
)

var variants = map[string]variant{
	floorBackground:   {peer: "floor", background: true},
	ourBackground:     {peer: us, background: true},
	wrapped:           {peer: "wrapped"},
	wrappedBackground: {peer: "wrapped", background: true},
	ofThree:           {peer: us, kind: "multi"},
	noLimit:           {peer: "unlimited"},
	onEtcd:            {peer: "etcdlock"},
	onZookeeper:       {peer: "zklock"},
	onAdvisory:        {peer: "advisory"},
	onRows:            {peer: "rows"},
}

// isOurs reports whether a peer is redlatch or one of its variants.
func isOurs(peer string) bool { return peer == us || strings.HasPrefix(peer, us+", ") }

// isFloor reports whether a peer is the floor or its variant.
func isFloor(peer string) bool { return peer == "floor" || peer == floorBackground }

// has reports whether a peer is measured in the scenario.
func (s scenario) has(peer string) bool {
	return slices.ContainsFunc(s.cells, func(c cell) bool { return c.rival == peer || slices.Contains(c.peers, peer) })
}

// taskOf returns the task of a peer in the cell.
func (c cell) taskOf(peer string) task {
	t := c.task
	t.Peer, t.Name = peer, "orders"
	if v, ok := variants[peer]; ok {
		t.Peer, t.Background, t.Kind = v.peer, v.background, cmp.Or(v.kind, t.Kind)
	}
	if peer == "floor" && t.Trace {
		t.Do = "signal" // only wake-ups are traced, and they have their own floor
	}
	if peer == "zookeeper" && t.Do == "wait" {
		t.Background = true // it takes no contexts, and what the benchmark needs for them is not its own
	}
	return t
}

// scenarios returns all scenarios. Most measurements take as long as the window.
func scenarios(window time.Duration) []scenario {
	return []scenario{
		uncontended(window), contended(window), processes(window), wakeUps(window), kinds(window), holds(), waiters(), redLocks(window),
		fairness(window), start(), rivals(window), rates(window), idle(),
	}
}

func uncontended(window time.Duration) scenario {
	s := scenario{
		number: 1, title: "Uncontended", base: "floor", best: "rate",
		about: "Each goroutine locks and unlocks its own name. The floor is two bare scripts that do the same on the server. " +
			"Background means that calls use `context.Background()`, and Wrap that redlatch borrows the connection. The names of the " +
			"multi-lock share a slot. The goroutines of a process share a connection or pool, except those of PostgreSQL and MariaDB: their locks belong to a " +
			"connection, and each goroutine has one.",
		measures: slices.Concat(latencies, costs),
	}
	for _, n := range []int{1, 8, 64} {
		s.cells = append(s.cells, cell{
			name: plural(n, "goroutine"), size: n, processes: 1,
			peers: slices.Concat([]string{"floor", floorBackground}, redisPeers, []string{ourBackground, wrapped, wrappedBackground, ofThree}, otherPeers),
			alone: n == 1, task: task{Do: "repeat", Kind: "lock", Own: true, Goroutines: n, For: window},
		})
	}
	return s
}

func contended(window time.Duration) scenario {
	s := scenario{
		number: 2, title: "Contended, one process", base: us, best: "rate",
		about: "Goroutines of one process lock and unlock the same name. Jain's index measures the equality of their shares: " +
			"1 is equal, 1/n means that one of n had everything. A waiter at the end counts with its wait so far; threads of Redisson and Curator " +
			"may finish within 2 s. Each goroutine of etcd also has a session, without which it would exclude nobody.",
		measures: slices.Concat(latencies, []string{"jain"}, costs),
	}
	for _, n := range []int{2, 16, 128, 1024} {
		peers := redisPeers
		switch n {
		case 16:
			peers = slices.Concat(redisPeers, otherPeers)
		case 2:
			peers = slices.Concat(redisPeers, []string{"etcd", onEtcd})
		case 128:
			peers = slices.Concat(redisPeers, manyPeers)
		}
		s.cells = append(s.cells, cell{
			name: plural(n, "goroutine"), size: n, processes: 1, peers: peers,
			task: task{Do: "repeat", Kind: "lock", Goroutines: n, For: window},
		})
	}
	return s
}

func processes(window time.Duration) scenario {
	return scenario{
		number: 3, title: "Contended, four processes", base: us, best: "rate",
		about: "32 goroutines in each of four processes lock and unlock the same name. Shares of processes are relative to " +
			"an equal share.",
		measures: slices.Concat(latencies, []string{"jain", "least", "most", "client", "server", "commands"}),
		cells: []cell{{
			name: "4 x 32 goroutines", size: 128, processes: 4, peers: slices.Concat(redisPeers, manyPeers),
			task: task{Do: "repeat", Kind: "lock", Goroutines: 32, For: 2 * window},
		}},
	}
}

func wakeUps(window time.Duration) scenario {
	s := scenario{
		number: 4, title: "Wake-up", base: "floor", best: "wake50",
		about: "The time from before the unlock in one process to after the lock in another, which waits for it: two processes " +
			"pass a lock to each other and hold it for 3 ms. The floor is a `PUBLISH` by one process and an `EVALSHA` by the other " +
			"on receipt. For libraries that poll, a wake-up counts only if the holder did not acquire the lock again first.",
		measures: []string{"wake50", "wake99", "wakes", "commands"},
		cells: []cell{{
			name: "2 processes", size: 2, processes: 2, peers: slices.Concat([]string{"floor"}, redisPeers),
			task: task{
				Do: "repeat", Kind: "lock", Goroutines: 1, For: 2 * window, Hold: 3 * time.Millisecond, Rest: time.Millisecond, Trace: true,
			},
		}},
	}
	fair := s.cells[0]
	fair.name, fair.peers, fair.task.Kind = fairWaking, []string{us, redisson}, "fair"
	stores := s.cells[0]
	stores.name, stores.peers = storeWaking, otherPeers
	s.cells = append(s.cells, fair, stores)
	return s
}

// Cells to which targets refer. orderCell has no throughput.
const (
	orderCell     = "fair lock, order of 64 that queue one after the other"
	fairWaking    = "fair lock, 2 processes"
	storeWaking   = "other stores, 2 processes"
	fairProcesses = "fair lock, 4 x 16 goroutines"
	semaphoreCell = "semaphore, 64 permits"
	permitCell    = "permit semaphore, 64 permits"
	latchCell     = "count-down latch, 4 x 250 waiters"
	waitersOfOne  = "10,000 waiters for one lock"
	waitersOfEach = "10,000 waiters for as many locks"
	sharedCell    = "4 x 8 goroutines"
	subscribed    = "8 goroutines, and a subscriber that does not wait"
	startCell     = "one server"
)

func redLockCell(servers, goroutines int) string {
	return fmt.Sprintf("%d servers, %s", servers, plural(goroutines, "goroutine"))
}

func kinds(window time.Duration) scenario {
	both := []string{us, redisson}
	of := task{Do: "repeat", Goroutines: 64, For: window}
	s := scenario{
		number: 5, title: "Other kinds", base: us, best: "rate",
		about: "64 goroutines of one process use one object. For a count-down latch the times are from before the last " +
			"`CountDown` to the return of the waiters.",
		measures: slices.Concat(latencies, []string{"jain", "scripts"}, costs),
	}
	add := func(name string, peers []string, t task) {
		s.cells = append(s.cells, cell{name: name, size: t.Goroutines, processes: 1, peers: peers, task: t})
	}
	fair := of
	fair.Kind = "fair"
	add("fair lock", both, fair)
	fair.Goroutines = 16
	s.cells = append(s.cells, cell{name: fairProcesses, size: 64, processes: 4, peers: both, task: fair})
	for _, writes := range []int{0, 10, 50, 100} {
		rw := of
		rw.Kind, rw.Writes = "rw", writes
		add(fmt.Sprintf("read-write lock, %d%% writes", writes), both, rw)
	}
	for _, permits := range []int{1, 10, 64} {
		sem := of
		sem.Kind, sem.Permits = "semaphore", permits
		add("semaphore, "+plural(permits, "permit"), both, sem)
	}
	permits := of
	permits.Kind, permits.Permits = "permit", 64
	add(permitCell, both, permits)
	s.cells = append(s.cells, cell{
		name: orderCell, size: 64, processes: 1, peers: []string{us},
		task:     task{Do: "order", Kind: "fair", Goroutines: 64},
		measures: []string{"queued", "overtook"}, best: "overtook",
	}, cell{
		name: "count-down latch, 1,000 waiters", size: 1000, processes: 1, peers: both,
		task:     task{Do: "latch", Kind: "latch", Goroutines: 1000, For: window},
		measures: []string{"wake50", "wake99", "last50"}, best: "last50",
	}, cell{
		name: latchCell, size: 1000, processes: 4, peers: []string{us},
		task:     task{Do: "latch", Kind: "latch", Goroutines: 250, For: window},
		measures: []string{"wake50", "wake99"}, best: "wake99",
	})
	return s
}

// aRound is how long held locks are kept: until each was renewed once.
const aRound = redlatch.DefaultWatchdogTimeout/3 + time.Second

func holds() scenario {
	s := scenario{
		number: 6, title: "Held locks", best: "cpu",
		about: "The cost of held locks over a round of redlatch's renewals: memory for each, including the caller's hold, and " +
			"processor time, of one core.",
		measures: []string{"memory", "resident", "cpu", "load"},
	}
	for _, n := range []int{1_000, 10_000, 100_000} {
		s.cells = append(s.cells, cell{
			name: plural(n, "lock"), size: n, processes: 1, peers: []string{us, "rueidislock"}, times: 1,
			task: task{
				Do: "hold", Kind: "lock", Own: true, Goroutines: n, Patience: 20 * time.Second,
				For: aRound,
			},
		})
	}
	return s
}

func waiters() scenario {
	s := scenario{
		number: 7, title: "Waiters", best: "memory",
		about:    "The memory of goroutines that wait for locks of another client, including their stacks.",
		measures: []string{"heap", "stacks", "memory", "resident"},
	}
	t := task{Do: "wait", Kind: "lock", Goroutines: 10_000, For: 3 * time.Second, Patience: 20 * time.Second}
	of := cell{name: waitersOfOne, size: 1, processes: 1, peers: []string{us, "rueidislock", "redsync", "redislock"}, task: t, times: 1}
	own := of
	own.name, own.size, own.task.Own = waitersOfEach, t.Goroutines, true
	s.cells = []cell{of, own}
	return s
}

func idle() scenario {
	s := scenario{
		number: 13, title: "Held locks and waiters on other stores", best: "memory",
		about: "What a hold costs over a round of redlatch's renewals, and what a waiter costs: memory and goroutines, with " +
			"connections, sessions and the caller's part, the processor time of one core, and the requests that etcd and ZooKeeper count. Locks of `pg_advisory_lock` have 64 " +
			"connections, one for each hold or waiter. A waiter of etcd's mutex has a session. Holds of rows have the connections of " +
			"the pool that acquired them, 64 at a time.",
		measures: []string{"memory", "resident", "threads", "requests", "cpu", "load"},
	}
	held := cell{processes: 1, times: 1, task: task{
		Do: "hold", Kind: "lock", Own: true, Whole: true, Patience: 20 * time.Second, For: aRound,
	}}
	waiting := held
	waiting.task.Do, waiting.task.Own, waiting.task.For = "wait", false, 3*time.Second
	waiting.measures, waiting.best = []string{"heap", "stacks", "memory", "resident", "threads"}, "memory"
	many := []string{us, "etcd", onEtcd, "zookeeper", onZookeeper, onAdvisory, onRows}
	add := func(n int, peers []string) {
		for _, c := range []cell{held, waiting} {
			c.size, c.task.Goroutines, c.peers = n, n, peers
			c.name = plural(n, "lock")
			if c.task.Do == "wait" {
				c.name = plural(n, "waiter") + " for one lock"
			}
			s.cells = append(s.cells, c)
		}
	}
	add(1000, many)
	add(64, []string{"postgres"})
	return s
}

func redLocks(window time.Duration) scenario {
	s := scenario{
		number: 8, title: "RedLock", base: us, best: "rate",
		about:    "One lock on several independent servers. Commands are those of all servers.",
		measures: slices.Concat(latencies, []string{"jain"}, costs),
	}
	for _, servers := range []int{3, 5} {
		for _, n := range []int{1, 16} {
			s.cells = append(s.cells, cell{
				name: redLockCell(servers, n), size: n, processes: 1, servers: servers,
				peers: []string{us, "redsync"}, alone: n == 1,
				task: task{Do: "repeat", Kind: "red", Goroutines: n, For: window},
			})
		}
	}
	return s
}

func fairness(window time.Duration) scenario {
	s := scenario{
		number: 9, title: "The price of fairness", base: noLimit, best: "rate",
		about: "Each holder works for 5 ms. After some acquisitions in a row, the waiters of a process pause for those of other " +
			"processes. Without a limit they never do. Publishing also counts subscribers that do not wait, for which a process " +
			"pauses in vain.",
		measures: []string{"rate", "p50", "p99", "jain", "least", "most"},
	}
	t := task{Do: "repeat", Kind: "lock", Goroutines: 8, For: 4 * window, Hold: 5 * time.Millisecond}
	shared := cell{name: sharedCell, size: 32, processes: 4, peers: []string{us, noLimit}, task: t}
	alone := shared
	alone.name, alone.size, alone.processes, alone.task.Overheard = subscribed, 8, 1, true
	alone.task.For = 12 * window // pauses in vain become rarer in the first 2 s
	s.cells = []cell{shared, alone}
	return s
}

func start() scenario {
	return scenario{
		number: 10, title: "Start", best: "trips",
		about: "The round trips from connecting to the first acquired lock that follow one another, those of TCP included. The server " +
			"knows the scripts already. The floor is a client of rueidis and its first script.",
		measures: []string{"trips", "commands"},
		cells: []cell{{
			name: startCell, processes: 1, peers: []string{"floor", us}, times: 1, task: task{Do: "start", Kind: "lock"},
		}},
	}
}

func rivals(window time.Duration) scenario {
	s := scenario{
		number: 11, title: "Beside Java, and far away", best: "rivals99",
		about: "Processes of redlatch and as many rivals want the same object again as soon as they have released it, and hold " +
			"it for a time. The rivals are processes of Redisson, or of redlatch with a longer round trip to the server. In the row of Redisson " +
			"all processes are Redisson's.",
		measures: []string{"own", "rivals", "ratio", "own99", "rivals99"},
	}
	add := func(processes, goroutines int, hold time.Duration, c cell) {
		where := "in Java"
		if c.trip > 0 {
			where = fmt.Sprintf("%v away", c.trip)
		}
		c.task.Kind = cmp.Or(c.task.Kind, "lock")
		c.name = fmt.Sprintf("%s held for %v, %d x %d and %d x %d %s", c.task.Kind, hold, processes/2, goroutines, processes/2, goroutines, where)
		c.size, c.processes = processes*goroutines, processes
		c.peers = append([]string{us}, c.peers...)
		c.task.Do, c.task.Goroutines, c.task.Hold = "repeat", goroutines, hold
		c.task.For = max(4*window, 100*hold, 150*c.trip)
		s.cells = append(s.cells, c)
	}
	add(2, 1, time.Millisecond, cell{rival: redisson})
	add(2, 1, 20*time.Millisecond, cell{rival: redisson})
	add(2, 16, time.Millisecond, cell{rival: redisson, peers: []string{redisson}})
	add(4, 16, time.Millisecond, cell{rival: redisson, peers: []string{redisson}})
	add(4, 64, time.Millisecond, cell{rival: redisson, peers: []string{redisson}})
	for _, kind := range []string{"semaphore", "permit"} {
		add(2, 4, 50*time.Millisecond, cell{rival: redisson, task: task{Kind: kind, Permits: 2}})
	}
	add(2, 4, time.Millisecond, cell{rival: us, trip: 60 * time.Millisecond})
	add(2, 1, time.Millisecond, cell{rival: us, trip: 2 * time.Millisecond})
	return s
}

func rates(window time.Duration) scenario {
	s := scenario{
		number: 12, title: "Rate limiters", base: us, best: "rate",
		about: "Goroutines acquire single permits, and wait if there are none. With 1,000,000 permits in 100 ms none waits. redlatch and " +
			"Redisson have a sliding window. The others have a burst, here as large as the rate, so they give up to twice as many " +
			"permits in an interval; redis_rate tells when to try again, and the goroutine does. x/time/rate is for one process.",
		measures: slices.Concat(latencies, []string{"scripts"}, costs),
	}
	add := func(processes, goroutines, permits int, peers ...string) {
		name := plural(goroutines, "goroutine")
		if processes > 1 {
			name = fmt.Sprintf("%d x %d goroutines", processes, goroutines)
		}
		if permits < 1_000_000 {
			name += fmt.Sprintf(", %d permits in %v", permits, limitPer)
		}
		s.cells = append(s.cells, cell{
			name: name, size: processes * goroutines, processes: processes, peers: append([]string{us, "redis_rate", redisson}, peers...),
			task: task{Do: "repeat", Kind: "rate", Goroutines: goroutines, Permits: permits, For: max(2*window, 10*limitPer)},
		})
	}
	add(1, 1, 1_000_000, "x/time/rate")
	add(1, 64, 1_000_000, "x/time/rate")
	add(1, 64, 100, "x/time/rate")
	add(4, 16, 100)
	return s
}
