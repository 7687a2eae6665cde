package zklock

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// odd are names that ZooKeeper would not take as they are, or that a bad escape would mix up.
var odd = []string{
	"orders-of", "orders/7", "orders%2F7", "/", "//", ".", "..", "...", "a.b", "%2E", "with space", "Grüße", "日本", "🔒", "a\x00b",
	"\x7f", "\u0085", "\uf8ff", "\ufffd", "\xff", "\xff\xfe", "a\nb", "locks", "zookeeper",
	strings.Repeat("x", maxName), strings.Repeat("/", maxName),
}

func TestNamesStayApart(t *testing.T) {
	paths := make(map[string]string)
	for _, name := range odd {
		require.NoError(t, checkName(name))
		escaped := escape(name)
		assert.NotContains(t, escaped, "/")
		if other, ok := paths[escaped]; ok {
			t.Errorf("%q and %q are %q", name, other, escaped)
		}
		paths[escaped] = name
	}
	assert.Equal(t, "orders%2F7", escape("orders/7"))
	require.ErrorIs(t, checkName(""), lock.ErrInvalid)
	require.ErrorIs(t, checkName(strings.Repeat("x", maxName+1)), lock.ErrInvalid)
}

func TestEveryNameIsUsable(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	for _, name := range odd {
		h := acquire(t, p.Lock(name))
		require.Len(t, nodes(t, p.conn, name), 1, "%q", name)
		require.NoError(t, h.Unlock(t.Context()), "%q", name)
	}
}

func TestAhead(t *testing.T) {
	node := func(kind string, n int) string { return fmt.Sprintf("%s_c:1_1_%010d", kind, n) }
	children := []string{
		node(read, 4), node(write, 3), node(read, 1), node(write, 7), node(read, 0),
		"foreign-0000000002", "write_x", node(write, 2),
	}
	names := func(places []place) (all []string) {
		for _, p := range places {
			all = append(all, p.name)
		}
		return all
	}

	own, ok := parse(node(read, 4))
	require.True(t, ok)
	others, present := ahead(children, own, &driver.Request{Shared: true})
	assert.True(t, present)
	assert.Equal(t, []string{node(write, 2), node(write, 3)}, names(others))
	assert.Equal(t, []string{node(write, 3)}, names(blocking(others, &driver.Request{Shared: true})))

	own, _ = parse(node(write, 7))
	others, present = ahead(children, own, &driver.Request{})
	assert.True(t, present)
	assert.Len(t, others, 5)
	assert.Equal(t, []string{node(read, 4)}, names(blocking(others, &driver.Request{})))
	assert.Equal(t, []string{node(write, 3), node(read, 4)}, names(blocking(others, &driver.Request{Permits: 2})))
	assert.Empty(t, blocking(others, &driver.Request{Permits: 6}))

	own.name = "write_c:2_1_0000000007"
	_, present = ahead(children, own, &driver.Request{})
	assert.False(t, present)
}

// The servers have the counter of a folder stand still at its end.
func TestNumbersThatAreUsedUpAreRefused(t *testing.T) {
	t.Parallel()
	p := open(t, []string{common.addr(t)})
	s := newStore(p.conn, p.session, DefaultPrefix, zk.WorldACL(zk.PermAll))
	defer s.Close()
	now, _ := s.session.state()
	for _, number := range []string{"2147483000", "-2147483648", "x"} {
		results := []zk.MultiResponse{
			{String: "/redlatch/locks/a/write_c:1_1_" + number}, {Stat: &zk.Stat{Mzxid: 1, NumChildren: 1}},
		}
		c := &claim{s: s, r: driver.Request{Name: "a"}, in: "/redlatch/locks/a", session: now.number}
		err := s.queued(c, time.Now(), "write_c:1_1_", results)
		require.ErrorContains(t, err, "used up")
	}
}

func TestPrefixIsChecked(t *testing.T) {
	for _, bad := range []string{"", "/", "a", "/a/", "//a", "/a//b", "/.", "/a/..", "/a%", "/a\x00"} {
		assert.Error(t, checkPrefix(bad), "%q", bad)
	}
	for _, good := range []string{"/a", "/a/b", "/a.b/c-d_e"} {
		assert.NoError(t, checkPrefix(good), "%q", good)
	}
}
