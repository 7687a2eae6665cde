package fairlock_test

import (
	"context"
	_ "embed"
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/wire"
)

var (
	//go:embed testdata/java_acquire.lua
	javaAcquires string
	//go:embed testdata/java_release.lua
	javaReleases string
	//go:embed testdata/java_leave.lua
	javaLeaves string

	peerAcquire = wire.NewScript(javaAcquires)
	peerRelease = wire.NewScript(javaReleases)
	peerLeave   = wire.NewScript(javaLeaves)
)

// java is a Java client that uses the lock "orders".
type java struct {
	t     testing.TB
	conn  rueidis.Client
	owner string
	wait  time.Duration // of its call, as its arithmetic uses it
	ahead time.Duration // its clock
}

func newJava(t testing.TB, conn rueidis.Client, number int, wait time.Duration) *java {
	return &java{t: t, conn: conn, owner: fmt.Sprintf("%s:%d", javaID, number), wait: wait}
}

func (j *java) exec(script *wire.Script, args ...string) rueidis.RedisResult {
	return script.Exec(context.Background(), j.conn, []string{orders, wire.FairQueue(orders), wire.FairTimeouts(orders)}, args)
}

func (j *java) now() string { return fmt.Sprint(time.Now().Add(j.ahead).UnixMilli()) }

// acquire acquires the lock if the client is first. Otherwise it enters the queue.
func (j *java) acquire() bool {
	j.t.Helper()
	err := j.exec(peerAcquire, wire.Millis(lease), j.owner, wire.Millis(j.wait), j.now(), "1").Error()
	if rueidis.IsRedisNil(err) {
		return true
	}
	require.NoError(j.t, err)
	return false
}

func (j *java) release() {
	j.t.Helper()
	n, err := j.exec(peerRelease, wire.Millis(lease), j.owner, j.now(), wire.LockChannel(orders)).AsInt64()
	require.NoError(j.t, err)
	require.EqualValues(j.t, 1, n)
}
