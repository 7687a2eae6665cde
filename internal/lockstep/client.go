package lockstep

import (
	"context"
	"crypto/sha1" // the server names scripts by their SHA-1
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/rueidis"
)

var (
	//go:embed clock.lua
	clockLua string
	//go:embed dump.lua
	dumpLua string
)

// commandLua runs a single command.
const commandLua = `return redis.call(unpack(ARGV))`

// Subscribers is the number of receivers that PUBLISH replies.
const Subscribers = 3

// Client is a connection to a server with a virtual clock. Scripts and commands run unchanged,
// except that they use this clock, and that their messages are kept for State instead of being
// published. Each request takes one round trip, which also returns the state of the server. A
// Client is not safe for concurrent use.
type Client struct {
	rueidis.Client
	// Now is the virtual time in ms since 1970.
	Now int64
	// Denied is a command that fails for want of a right.
	Denied string

	loaded map[string]string // SHAs of the adapted scripts, by SHA and source of the original
	state  State
}

// Connect returns a client on a database. The end of the test closes it.
func Connect(t testing.TB, addr string, database int) *Client {
	t.Helper()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, SelectDB: database, DisableCache: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return &Client{Client: conn, loaded: map[string]string{}}
}

// Reset empties the database and sets the clock.
func (c *Client) Reset(now int64) {
	c.Now, c.Denied, c.state = now, "", State{}
	Check(c.Client.Do(context.Background(), c.B().Flushdb().Build()).Error())
}

// Do implements rueidis.Client.
func (c *Client) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	return c.DoMulti(ctx, cmd)[0]
}

// DoMulti implements rueidis.Client. Without a command it only updates the state.
func (c *Client) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	all := make(rueidis.Commands, 0, len(cmds)+2)
	all = append(all, c.B().Arbitrary("MSET", "test:clock", strconv.FormatInt(c.Now, 10), "test:denied", c.Denied).Build())
	for _, cmd := range cmds {
		all = append(all, c.virtual(cmd.Commands()))
	}
	all = append(all, c.run(dumpLua, "0"))
	replies := c.Client.DoMulti(ctx, all...)
	c.read(replies[len(replies)-1])
	return replies[1 : len(replies)-1]
}

// virtual returns the command that runs a command under the virtual clock.
func (c *Client) virtual(words []string) rueidis.Completed {
	switch words[0] {
	case "EVAL":
		return c.run(words[1], words[2:]...)
	case "EVALSHA":
		// A script that was not adapted must not run, even if the server knows it.
		sha, ok := c.loaded[words[1]]
		if !ok {
			sha = strings.Repeat("0", 2*sha1.Size)
		}
		return c.evalsha(sha, words[2:])
	}
	return c.run(commandLua, slices.Concat([]string{"0"}, words)...)
}

// run returns the command that runs a script under the virtual clock.
func (c *Client) run(source string, args ...string) rueidis.Completed {
	sha, ok := c.loaded[source]
	if !ok {
		sha = must(c.Client.Do(context.Background(), c.B().ScriptLoad().Script(clockLua+source).Build()).ToString())
		sum := sha1.Sum([]byte(source))
		c.loaded[source], c.loaded[hex.EncodeToString(sum[:])] = sha, sha
	}
	return c.evalsha(sha, args)
}

func (c *Client) evalsha(sha string, args []string) rueidis.Completed {
	return c.B().Arbitrary("EVALSHA", sha).Args(args...).Build()
}

// State is the state of a server or of a model.
type State struct {
	Keys map[string]Key
	Told []string // channels and messages published since the last State
}

// Key is the value of a key.
type Key struct {
	Is   string // type and content
	Ends int64  // expiry by the virtual clock, 0 for none
}

// State returns the state after the last request.
func (c *Client) State() State {
	s := c.state
	c.state.Told = nil
	return s
}

// Compare fails the walk if the server differs from the model.
func (c *Client) Compare(want State) { Check(c.State().differ(want)) }

// Wait advances the virtual clock.
func (c *Client) Wait(until int64) {
	c.Now = until
	c.DoMulti(context.Background())
}

func must[V any](v V, err error) V {
	Check(err)
	return v
}

// read sets the state to the reply of dump.lua.
func (c *Client) read(dump rueidis.RedisResult) {
	reply := must(dump.ToArray())
	keys := must(reply[0].ToArray())
	c.state.Keys = make(map[string]Key, len(keys))
	c.state.Told = append(c.state.Told, must(reply[1].AsStrSlice())...)
	for _, k := range keys {
		field := must(k.ToArray())
		name, kind, left := must(field[0].ToString()), must(field[1].ToString()), must(field[2].AsInt64())
		var content []string
		if kind == "string" {
			content = []string{must(field[3].ToString())}
		} else {
			content = must(field[3].AsStrSlice())
		}
		key := Key{Is: canonical(kind, content)}
		if left >= 0 {
			key.Ends = c.Now + left
		}
		c.state.Keys[name] = key
	}
}

// canonical returns a key as text, sorted unless the order is significant.
func canonical(kind string, content []string) string {
	if kind == "hash" || kind == "zset" {
		pairs := make([]string, 0, len(content)/2)
		for i := 0; i < len(content); i += 2 {
			pairs = append(pairs, content[i]+"="+content[i+1])
		}
		content = pairs
	}
	if kind != "list" {
		slices.Sort(content)
	}
	return kind + " " + strings.Join(content, " ")
}

// Put adds a key to the state, unless it has no content. The content of hashes and sorted sets
// alternates fields and values.
func (s *State) Put(name, kind string, ends int64, content ...string) {
	if len(content) == 0 {
		return
	}
	if s.Keys == nil {
		s.Keys = map[string]Key{}
	}
	s.Keys[name] = Key{canonical(kind, content), ends}
}

// Pairs returns the content of a hash or a sorted set.
func Pairs[V int | int64](of map[string]V) []string {
	all := make([]string, 0, 2*len(of))
	for field, value := range of {
		all = append(all, field, strconv.FormatInt(int64(value), 10))
	}
	return all
}

func (s State) differ(want State) error {
	var list strings.Builder
	names := maps.Clone(s.Keys)
	maps.Copy(names, want.Keys)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if got, want := s.Keys[name], want.Keys[name]; got != want {
			fmt.Fprintf(&list, "\n%q\n\tgot  %v\n\twant %v", name, got, want)
		}
	}
	if !slices.Equal(s.Told, want.Told) {
		fmt.Fprintf(&list, "\nmessages\n\tgot  %q\n\twant %q", s.Told, want.Told)
	}
	if list.Len() == 0 {
		return nil
	}
	return errors.New("the server differs from the model:" + list.String())
}

func (k Key) String() string {
	switch {
	case k.Is == "":
		return "missing"
	case k.Ends == 0:
		return fmt.Sprintf("%q", k.Is)
	}
	return fmt.Sprintf("%q until %d", k.Is, k.Ends)
}
