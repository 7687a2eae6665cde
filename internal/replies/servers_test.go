package replies_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// class is what the library makes of a server's error.
type class struct {
	outcome                              wire.Outcome
	kind                                 error
	moving, elsewhere, wrongType, denied bool
}

var (
	refused    = class{outcome: wire.Refused}
	wrongType  = class{outcome: wire.Refused, wrongType: true}
	denied     = class{outcome: wire.Refused, denied: true}
	deliberate = class{outcome: wire.Passing}
	passing    = class{outcome: wire.Passing, kind: lock.ErrUnavailable}
	elsewhere  = class{outcome: wire.Passing, kind: lock.ErrUnavailable, elsewhere: true}
	divided    = class{outcome: wire.Passing, kind: lock.ErrUnavailable, elsewhere: true, moving: true}
	cutShort   = class{outcome: wire.Unknown, kind: lock.ErrIndeterminate, moving: true}
)

func classOf(err error) class {
	return class{
		wire.OutcomeOf(err), wire.KindOf(err),
		wire.IsMoving(err), wire.IsElsewhere(err), wire.IsWrongType(err), wire.IsDenied(err),
	}
}

// answer is what servers say in a situation, and what the library makes of it.
type answer struct {
	situation string
	class     class
	// says has the beginning of the error by the line of servers that was the first to say it: redis-7.0.
	// A server of a later line says it too. One without an entry does not know the situation.
	says    map[string]string
	provoke func(x *site) error
}

// all is for an error that every line of servers says.
func all(text string) map[string]string { return byName(text, text) }

// byName is for an error that says the name of the server.
func byName(redis, valkey string) map[string]string {
	return map[string]string{"redis-6.2": redis, "valkey-7.2": valkey}
}

const (
	wrongTypeWords = "WRONGTYPE Operation against a key holding the wrong kind of value"
	oomWords       = "OOM command not allowed when used memory > 'maxmemory'."
	replicasWords  = "NOREPLICAS Not enough good replicas to write."
	misconfWords   = " is configured to save RDB snapshots, but it"
	readOnlyWords  = "READONLY You can't write against a read only replica."
	tryAgainWords  = "TRYAGAIN Multiple keys request during rehashing of slot"
	crossSlotWords = "CROSSSLOT Keys in request don't hash to the same slot"

	// Redis 6.2 says where in a script a command has failed, and for some errors twice.
	inScript = "Error running script (call to f_*): @user_script:1: "
	twice    = inScript + "@user_script: 1: "
)

// inScripts is for an error that is the same in a script, but for the position that Redis 6.2 adds.
func inScripts(before, text string) map[string]string {
	return map[string]string{"redis-6.2": before + text, "redis-7.0": text, "valkey-7.2": text}
}

// nonLocal is what the lines say of a script that uses a key of another node.
var nonLocal = map[string]string{
	"redis-6.2":  twice + "Lua script attempted to access a non local key in a cluster node",
	"redis-7.0":  "Script attempted to access a non local key in a cluster node script: ",
	"valkey-7.2": "Script attempted to access a non local key in a cluster node script: ",
	"valkey-9.0": "Attempted to access a non local key in a cluster node script: ",
}

// answers are those of a single server.
var answers = []answer{
	{"wrong type", wrongType, all(wrongTypeWords), func(x *site) error {
		x.must("SET", "text", "x")
		return x.do("HGET", "text", "field")
	}},
	{"wrong type in a script", wrongType, inScripts(inScript, wrongTypeWords), func(x *site) error {
		x.must("SET", "text", "x")
		return x.eval("redis.call('HGET', KEYS[1], 'field')", "text")
	}},
	{"wrong type that a script has caught", wrongType, all(wrongTypeWords), func(x *site) error {
		x.must("SET", "text", "x")
		return x.eval("return redis.pcall('HGET', KEYS[1], 'field')", "text")
	}},
	{"no number in a script", wrongType, inScripts(inScript+"ERR ", "value is not an integer or out of range"), func(x *site) error {
		x.must("SET", "text", "x")
		return x.eval("redis.call('INCRBY', KEYS[1], 0)", "text")
	}},
	{"no number in a hash", wrongType, inScripts(inScript+"ERR ", "hash value is not an integer"), func(x *site) error {
		x.must("HSET", "hash", "field", "x")
		return x.eval("redis.call('HINCRBY', KEYS[1], 'field', 1)", "hash")
	}},
	{"unknown script", refused, all("NOSCRIPT No matching script"), func(x *site) error {
		return x.do("EVALSHA", strings.Repeat("0", 40), "0")
	}},
	{"unknown command", denied, map[string]string{
		"redis-6.2": "unknown command `FOO`, ", "redis-7.0": "unknown command 'FOO', ", "valkey-7.2": "unknown command 'FOO', ",
	}, func(x *site) error { return x.do("FOO") }},
	{"unknown command in a script", denied, map[string]string{
		"redis-6.2":  twice + "Unknown Redis command called from Lua script",
		"redis-7.0":  "Unknown Redis command called from script script: ",
		"valkey-7.2": "Unknown ",
	}, func(x *site) error { return x.eval("redis.call('FOO')") }},
	{"unknown subcommand", denied, map[string]string{
		"redis-6.2": "Unknown subcommand or wrong number of arguments for 'FOO'.",
		"redis-7.0": "unknown subcommand 'FOO'.", "valkey-7.2": "unknown subcommand 'FOO'.",
	}, func(x *site) error { return x.do("PUBSUB", "FOO") }},

	{"out of memory", deliberate, all(oomWords), func(x *site) error {
		defer x.set("maxmemory", "1", "0")()
		return x.do("SET", "a", "b")
	}},
	{"out of memory in a script", deliberate, inScripts(twice+"-", oomWords), func(x *site) error {
		defer x.set("maxmemory", "1", "0")()
		return x.eval("redis.call('SET', 'a', 'b')")
	}},
	{"out of memory that a script has caught", deliberate, inScripts("@user_script: 1: -", oomWords), func(x *site) error {
		defer x.set("maxmemory", "1", "0")()
		return x.eval("return redis.pcall('SET', 'a', 'b')")
	}},
	{"out of memory that Lua has caught", deliberate, inScripts("@user_script: 1: -", oomWords), func(x *site) error {
		defer x.set("maxmemory", "1", "0")()
		return x.eval(`local function set() redis.call('SET', 'a', 'b') end
			local _, why = pcall(set)
			return redis.error_reply(type(why) == 'table' and why.err or why)`)
	}},
	{"too few replicas", deliberate, all(replicasWords), func(x *site) error {
		defer x.set("min-replicas-to-write", "1", "0")()
		return x.do("SET", "a", "b")
	}},
	{"too few replicas in a script", deliberate, inScripts(twice+"-", replicasWords), func(x *site) error {
		defer x.set("min-replicas-to-write", "1", "0")()
		return x.eval("redis.call('SET', 'a', 'b')")
	}},
	{"a disk that is full", deliberate, byName("MISCONF Redis"+misconfWords, "MISCONF Valkey"+misconfWords), func(x *site) error {
		defer x.cannotSave()()
		return x.do("SET", "a", "b")
	}},
	{"a disk that is full, in a script", deliberate, map[string]string{
		"redis-6.2":  twice + "-MISCONF Redis" + misconfWords,
		"redis-7.0":  "MISCONF Redis" + misconfWords,
		"valkey-7.2": "MISCONF Valkey" + misconfWords,
	}, func(x *site) error {
		defer x.cannotSave()()
		return x.eval("redis.call('SET', 'a', 'b')")
	}},

	{"no right to a command", denied, map[string]string{
		"redis-6.2":  "NOPERM this user has no permissions to run the 'set' command or its subcommand",
		"redis-7.0":  "NOPERM this user has no permissions to run the 'set' command",
		"redis-7.2":  "NOPERM User guest has no permissions to run the 'set' command",
		"valkey-7.2": "NOPERM User guest has no permissions to run the 'set' command",
	}, func(x *site) error { return x.guest().do("SET", "a", "b") }},
	{"no right to a key", denied, map[string]string{
		"redis-6.2":  "NOPERM this user has no permissions to access one of the keys used as arguments",
		"redis-7.2":  "NOPERM No permissions to access a key",
		"valkey-7.2": "NOPERM No permissions to access a key",
	}, func(x *site) error { return x.guest().eval("return 1", "b") }},
	{"no right to a channel", denied, map[string]string{
		"redis-6.2":  "NOPERM this user has no permissions to access one of the channels used as arguments",
		"redis-7.2":  "NOPERM No permissions to access a channel",
		"valkey-7.2": "NOPERM No permissions to access a channel",
	}, func(x *site) error { return x.guest().do("PUBLISH", "b", "c") }},
	{"no right to a command in a script", denied, map[string]string{
		"redis-6.2":  twice + "The user executing the script can't run this command or subcommand",
		"redis-7.0":  "The user executing the script can't run this command or subcommand script: ",
		"redis-7.2":  "ACL failure in script: User guest has no permissions to run the 'set' command script: ",
		"valkey-7.2": "ACL failure in script: User guest has no permissions to run the 'set' command script: ",
	}, func(x *site) error { return x.guest().eval("redis.call('SET', 'a', 'b')") }},
	{"no right to a key in a script", denied, map[string]string{
		"redis-6.2":  twice + "The user executing the script can't access at least one of the keys mentioned",
		"redis-7.0":  "The user executing the script can't access at least one of the keys mentioned",
		"redis-7.2":  "ACL failure in script: No permissions to access a key script: ",
		"valkey-7.2": "ACL failure in script: No permissions to access a key script: ",
	}, func(x *site) error { return x.guest().eval("redis.call('DEL', 'b')") }},
	{"no right to a channel in a script", denied, map[string]string{
		"redis-6.2":  twice + "The user executing the script can't publish to the channel mentioned in the command",
		"redis-7.0":  "The user executing the script can't publish to the channel mentioned in the command script: ",
		"redis-7.2":  "ACL failure in script: No permissions to access a channel script: ",
		"valkey-7.2": "ACL failure in script: No permissions to access a channel script: ",
	}, func(x *site) error { return x.guest().eval("redis.call('PUBLISH', 'b', 'c')") }},
	{"no right that a script has caught", denied, map[string]string{
		"redis-6.2":  "@user_script: 1: The user executing the script can't run this command or subcommand",
		"redis-7.0":  "The user executing the script can't run this command or subcommand",
		"redis-7.2":  "ACL failure in script: User guest has no permissions to run the 'set' command",
		"valkey-7.2": "ACL failure in script: User guest has no permissions to run the 'set' command",
	}, func(x *site) error { return x.guest().eval("return redis.pcall('SET', 'a', 'b')") }},
	{"no right to a database", denied, map[string]string{
		"valkey-9.1": "NOPERM No permissions to access database",
	}, func(x *site) error {
		x.must("ACL", "SETUSER", "tenant", "on", "nopass", "~*", "+@all", "resetdbs", "db=0")
		return x.open(rueidis.ClientOption{Username: "tenant", Password: "x", SelectDB: 1})
	}},
	{"a database that does not exist", refused, all("DB index is out of range"), func(x *site) error {
		return x.open(rueidis.ClientOption{SelectDB: 99})
	}},
	{"no password", passing, all("NOAUTH HELLO must be called with the client already authenticated"), func(x *site) error {
		defer x.set("requirepass", "secret", "")()
		return x.open(rueidis.ClientOption{})
	}},
	{"a wrong password", passing, all("WRONGPASS invalid username-password pair"), func(x *site) error {
		defer x.set("requirepass", "secret", "")()
		return x.open(rueidis.ClientOption{Password: "wrong"})
	}},
	{"too many clients", passing, all("max number of clients reached"), func(x *site) error {
		defer x.set("maxclients", "1", "1000")()
		// rueidis returns the end of the connection after the reply instead.
		said, err := testserver.Command(x.s.Addr, "PING")
		require.NoError(x.t, err)
		return x.do("EVAL", "return redis.error_reply(ARGV[1])", "0", strings.TrimPrefix(said, "-"))
	}},

	{"a replica", passing, all(readOnlyWords), func(x *site) error {
		defer x.replicaOf("127.0.0.1", "1")()
		return x.do("SET", "a", "b")
	}},
	{"a replica, in a script", passing, inScripts(twice+"-", readOnlyWords), func(x *site) error {
		defer x.replicaOf("127.0.0.1", "1")()
		return x.eval("redis.call('SET', 'a', 'b')")
	}},
	{"a replica that redirects", passing, map[string]string{"valkey-8.0": "REDIRECT 127.0.0.1:1"}, func(x *site) error {
		defer x.replicaOf("127.0.0.1", "1")()
		x.must("CLIENT", "CAPA", "redirect")
		return x.do("SET", "a", "b")
	}},
	{"a replica without its primary", passing, all("MASTERDOWN Link with MASTER is down"), func(x *site) error {
		defer x.replicaOf("127.0.0.1", "1")()
		defer x.set("replica-serve-stale-data", "no", "yes")()
		return x.eval("return redis.call('GET', 'a')")
	}},
	{"busy with a script", passing, byName("BUSY Redis is busy running a script.", "BUSY Valkey is busy running a script."), func(x *site) error {
		killed := x.busy()
		err := x.eval("return 1")
		x.must("SCRIPT", "KILL")
		<-killed
		return err
	}},
	{"a script that was killed", passing, inScripts(inScript, "Script killed by user with SCRIPT KILL"), func(x *site) error {
		killed := x.busy()
		x.must("SCRIPT", "KILL")
		return <-killed
	}},
}

// TestAnswers and TestAnswersInACluster check what the servers say, which is why they run on each of them.
func TestAnswers(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		x := newSite(t, harness.Own(t, shared.Program))
		for _, a := range answers {
			a.check(x)
		}
	})
}

func TestAnswersOfALoadingServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		// The server loads for 5 s, and answers after each 2 MB.
		s := harness.Own(t, shared.Program, "--key-load-delay", "5000", "--rdbcompression", "no")
		x := newSite(t, s)
		x.must("EVAL", "for i = 1, 1000 do redis.call('SET', 'filler:' .. i, string.rep('x', 20000)) end", "0")
		x.must("SAVE")
		s.Kill()
		require.NoError(t, s.Restart())
		harness.Answers(t, s, "-LOADING")
		answer{"loading", passing, byName("LOADING Redis is loading the dataset in memory", "LOADING Valkey is loading the dataset in memory"),
			func(x *site) error { return newSite(x.t, s).eval("return 1") }}.check(x)
	})
}

// The slots of these keys: b has 3300 and is of the first primary, a has 15495 and is of the last.
var clusterAnswers = []answer{
	{"another node", elsewhere, all("MOVED 3300 127.0.0.1:"), func(x *site) error { return x.of("a").eval("return 1", "b") }},
	{"keys of two slots", refused, all(crossSlotWords), func(x *site) error { return x.of("a").eval("return 1", "a", "b") }},
	{"a script that uses the key of another node", cutShort, nonLocal, func(x *site) error {
		return x.of("b").eval("redis.call('GET', 'a')", "b")
	}},
	{"a database in a cluster", refused, map[string]string{
		"redis-6.2": "SELECT is not allowed in cluster mode", "valkey-7.2": "SELECT is not allowed in cluster mode",
		"valkey-9.0": "DB index is out of range",
	}, func(x *site) error { return x.of("a").open(rueidis.ClientOption{SelectDB: 1}) }},

	{"a key that has moved with its slot", elsewhere, all("ASK 3300 127.0.0.1:"), func(x *site) error {
		defer x.moving("b")()
		return x.of("b").eval("return 1", "{b} moved")
	}},
	{"keys that are on two nodes", divided, map[string]string{"redis-7.0": tryAgainWords, "valkey-7.2": tryAgainWords}, twoNodes},
	{"keys that are on two nodes", elsewhere, map[string]string{"redis-6.2": "ASK 3300 127.0.0.1:", "redis-7.0": ""}, twoNodes},
	{"keys that are on two nodes, of which one has asked for the other", divided, all(tryAgainWords),
		func(x *site) error {
			x.of("b").must("SET", "b", "1")
			defer x.moving("b")()
			other := x.of("a")
			replies := other.conn.DoMulti(x.t.Context(), other.conn.B().Asking().Build(),
				other.command("EVAL", "return 1", "2", "b", "{b} moved"))
			return replies[1].Error()
		}},
	{"a script that uses a key that has moved", cutShort, nonLocal, func(x *site) error {
		x.of("b").must("SET", "b", "1")
		defer x.moving("b")()
		return x.of("b").eval("redis.call('EXISTS', '{b} moved')", "b")
	}},
	{"a script that looks for a key that it has deleted", cutShort, nonLocal, func(x *site) error {
		x.of("b").must("SET", "b", "1")
		defer x.moving("b")()
		return x.of("b").eval("redis.call('DEL', KEYS[1]) redis.call('EXISTS', KEYS[1])", "b")
	}},

	{"a slot without a node", elsewhere, all("CLUSTERDOWN Hash slot not served"), func(x *site) error {
		defer x.unserved("b")()
		return x.of("b").eval("return 1", "b")
	}},
	{"a script that uses a key without a node", cutShort, map[string]string{
		"redis-6.2":  nonLocal["redis-6.2"],
		"redis-7.0":  nonLocal["redis-7.0"],
		"redis-7.4":  "Script attempted to access a slot not served script: ",
		"valkey-7.2": nonLocal["redis-7.0"],
		"valkey-8.0": "Script attempted to access a slot not served script: ",
		"valkey-9.0": nonLocal["valkey-9.0"],
	}, func(x *site) error {
		defer x.unserved("b")()
		return x.of("b").eval("redis.call('GET', 'b')")
	}},
	{"a cluster that is down", elsewhere, all("CLUSTERDOWN The cluster is down"), func(x *site) error {
		defer x.down()()
		return x.of("c").eval("return 1", "c")
	}},
	{"a script that writes while the cluster only serves reads", passing, map[string]string{
		"redis-6.2":  twice + "Lua script attempted to execute a write command while the cluster is down and readonly",
		"redis-7.0":  "Script attempted to execute a write command while the cluster is down and readonly script: ",
		"valkey-7.2": "Script attempted to execute a write command while the cluster is down and readonly script: ",
		"valkey-9.0": "Can not execute a write command 'set' while the cluster is down and readonly script: ",
	}, func(x *site) error {
		defer x.of("c").set("cluster-allow-reads-when-down", "yes", "no")()
		defer x.down()()
		return x.of("c").eval("redis.call('SET', KEYS[1], 'b')", "c")
	}},

	// The last: after it a node of Valkey 9.1 refuses the commands of all scripts with the same words.
	{"a command of a script with keys of two slots", cutShort, map[string]string{
		"redis-6.2": nonLocal["redis-6.2"], "redis-7.0": nonLocal["redis-7.0"], "redis-7.4": "",
		"valkey-7.2": nonLocal["redis-7.0"], "valkey-8.0": "", "valkey-9.0": nonLocal["valkey-9.0"],
	}, twoSlots},
	{"a command of a script with keys of two slots", refused, map[string]string{
		"redis-7.4":  "Command 'del' in script attempted to access keys that don't hash to the same slot script: ",
		"valkey-8.0": "Command 'del' in script attempted to access keys that don't hash to the same slot script: ",
		"valkey-9.0": "",
	}, twoSlots},
}

func twoNodes(x *site) error {
	x.of("b").must("SET", "b", "1")
	defer x.moving("b")()
	return x.of("b").eval("return 1", "b", "{b} moved")
}

func twoSlots(x *site) error { return x.of("c").eval("redis.call('DEL', KEYS[1], 'd')", "c") }

func TestAnswersInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		x := newSite(t, cluster.Primaries[0])
		x.cluster = cluster
		for _, a := range clusterAnswers {
			a.check(x)
		}
	})
}

// check provokes the answer of a server.
func (a answer) check(x *site) {
	x.t.Helper()
	want := x.expected(a.says)
	if want == "" {
		return
	}
	err := a.provoke(x)
	require.Error(x.t, err, a.situation)
	_, isReply := rueidis.IsRedisErr(err)
	require.True(x.t, isReply, "%s: %v", a.situation, err)
	require.True(x.t, begins(err.Error(), want), "%s: %s says %q, and the table says %q", a.situation, x.line, err, want)
	require.Equal(x.t, a.class, classOf(err), "%s: %v", a.situation, err)
}

// begins reports whether text begins with the pattern, in which a star stands for any word.
func begins(text, pattern string) bool {
	before, after, star := strings.Cut(pattern, "*")
	rest, ok := strings.CutPrefix(text, before)
	if !ok || !star {
		return ok
	}
	i := strings.IndexFunc(rest, func(r rune) bool { return !strings.ContainsRune("0123456789abcdef", r) })
	return i > 0 && strings.HasPrefix(rest[i:], after)
}

// site is a server, or a cluster, that is asked.
type site struct {
	t       *testing.T
	s       *testserver.Server
	conn    rueidis.Client
	line    string // of the server
	cluster *testserver.Cluster
}

func newSite(t *testing.T, s *testserver.Server) *site {
	t.Helper()
	x := &site{t: t, s: s}
	var err error
	x.conn, err = x.connect(rueidis.ClientOption{})
	require.NoError(t, err)
	t.Cleanup(x.conn.Close)
	info, err := x.conn.Do(t.Context(), x.command("INFO", "server")).ToString()
	require.NoError(t, err)
	fields := map[string]string{}
	for field := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(field), ":")
		fields[name] = value
	}
	x.line = "redis-" + fields["redis_version"]
	if version := fields["valkey_version"]; version != "" {
		x.line = "valkey-" + version
	}
	return x
}

// expected returns the entry of the server's line, or of the last line before it.
func (x *site) expected(says map[string]string) (text string) {
	name, version := parseLine(x.line)
	last := -1
	for line, words := range says {
		if n, since := parseLine(line); n == name && since <= version && since > last {
			text, last = words, since
		}
	}
	return text
}

// parseLine returns the name in a line, and a number that grows with the version.
func parseLine(line string) (name string, version int) {
	name, text, _ := strings.Cut(line, "-")
	parts := strings.Split(text, ".")
	major, _ := strconv.Atoi(parts[0])
	minor, _ := strconv.Atoi(parts[1])
	return name, 1000*major + minor
}

// connect connects to the server, and not to its cluster.
func (x *site) connect(opt rueidis.ClientOption) (rueidis.Client, error) {
	opt.InitAddress, opt.ForceSingleClient, opt.DisableCache, opt.DisableRetry = []string{x.s.Addr}, true, true, true
	return rueidis.NewClient(opt)
}

// open returns why a connection cannot be made.
func (x *site) open(opt rueidis.ClientOption) error {
	conn, err := x.connect(opt)
	if err == nil {
		conn.Close()
	}
	return err
}

func (x *site) command(words ...string) rueidis.Completed {
	return x.conn.B().Arbitrary(words...).Build()
}

func (x *site) do(words ...string) error {
	return x.conn.Do(context.Background(), x.command(words...)).Error()
}

func (x *site) must(words ...string) {
	x.t.Helper()
	if err := x.do(words...); !rueidis.IsRedisNil(err) {
		require.NoError(x.t, err, words)
	}
}

func (x *site) eval(script string, keys ...string) error {
	return x.do(append([]string{"EVAL", script, strconv.Itoa(len(keys))}, keys...)...)
}

// set changes a setting of the server and returns what undoes that.
func (x *site) set(name, value, before string) (undo func()) {
	x.t.Helper()
	x.must("CONFIG", "SET", name, value)
	return func() { x.must("CONFIG", "SET", name, before) }
}

func (x *site) replicaOf(host, port string) (undo func()) {
	x.must("REPLICAOF", host, port)
	return func() { x.must("REPLICAOF", "NO", "ONE") }
}

// cannotSave makes the server fail to save its data.
func (x *site) cannotSave() (undo func()) {
	dir, err := x.conn.Do(x.t.Context(), x.command("CONFIG", "GET", "dir")).AsStrMap()
	require.NoError(x.t, err)
	inTheWay := filepath.Join(dir["dir"], "dump.rdb")
	_ = os.Remove(inTheWay) // saved before
	require.NoError(x.t, os.Mkdir(inTheWay, 0o700))
	saved := func(status string) {
		x.must("BGSAVE")
		harness.Eventually(x.t, 10*time.Second, "the data was saved: "+status, func() bool {
			info, err := testserver.Info(x.s.Addr, "persistence")
			return err == nil && info["rdb_bgsave_in_progress"] == "0" && info["rdb_last_bgsave_status"] == status
		})
	}
	unset := x.set("save", "3600 1", "")
	saved("err")
	return func() {
		require.NoError(x.t, os.Remove(inTheWay))
		saved("ok")
		unset()
	}
}

// guest returns a connection of a user who may use the key and the channel a, and most commands.
func (x *site) guest() *site {
	x.must("ACL", "SETUSER", "guest", "reset", "on", "nopass", "~a", "resetchannels", "&a", "+@all", "-set")
	g := *x
	var err error
	g.conn, err = x.connect(rueidis.ClientOption{Username: "guest", Password: "x"})
	require.NoError(x.t, err)
	x.t.Cleanup(g.conn.Close)
	return &g
}

// busy has the server run an endless script, and returns its error.
func (x *site) busy() <-chan error {
	x.must("CONFIG", "SET", "lua-time-limit", "10")
	conn, err := x.connect(rueidis.ClientOption{})
	require.NoError(x.t, err)
	x.t.Cleanup(conn.Close)
	killed := make(chan error, 1)
	go func() { killed <- conn.Do(context.Background(), x.command("EVAL", "while true do end", "0")).Error() }()
	harness.Answers(x.t, x.s, "-BUSY")
	return killed
}

// of returns the primary of the key at the beginning.
func (x *site) of(key string) *site {
	node := x.cluster.Primaries[map[string]int{"b": 0, "c": 1, "a": 2}[key]]
	if node == x.s {
		return x
	}
	return newSite(x.t, node)
}

// moving begins to move the slot of a key to the last primary.
func (x *site) moving(key string) (undo func()) {
	_, err := x.cluster.BeginMove(key)
	require.NoError(x.t, err)
	return func() {
		for _, node := range x.cluster.Primaries {
			_, err := testserver.Query(node.Addr, "CLUSTER", "SETSLOT", strconv.Itoa(wire.Slot(key)), "STABLE")
			require.NoError(x.t, err)
		}
		x.of(key).must("DEL", key)
	}
}

// unserved takes the slot of a key from its node.
func (x *site) unserved(key string) (undo func()) {
	slot := strconv.Itoa(wire.Slot(key))
	node := x.of(key)
	node.must("CLUSTER", "DELSLOTS", slot)
	return func() { node.must("CLUSTER", "ADDSLOTS", slot) }
}

// down brings the cluster down as seen by the second primary, because a slot of it is not served.
func (x *site) down() (undo func()) {
	node := x.of("c")
	unset := node.set("cluster-require-full-coverage", "yes", "no")
	slot := strconv.Itoa(wire.Slot("c") + 1)
	state := func(reply string) {
		harness.Eventually(x.t, 10*time.Second, "the cluster is "+reply, func() bool {
			info, err := testserver.Query(node.s.Addr, "CLUSTER", "INFO")
			return err == nil && strings.Contains(info[0], "cluster_state:"+reply)
		})
	}
	node.must("CLUSTER", "DELSLOTS", slot)
	state("fail")
	return func() {
		node.must("CLUSTER", "ADDSLOTS", slot)
		unset()
		state("ok")
	}
}
