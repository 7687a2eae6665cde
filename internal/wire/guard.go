package wire

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/redis/rueidis"
)

// Guard returns a client like c for the hooks of others, which may panic. A panic becomes the error of
// the request, whose outcome is unknown: the caller cleans up after it as after a lost reply, and no
// goroutine ends the process. report is called with that error and the stack.
func Guard(c rueidis.Client, report func(err error, stack string)) rueidis.Client {
	return guard{c, report}
}

type guard struct {
	rueidis.Client
	report report
}

type guardedConn struct {
	rueidis.DedicatedClient
	report report
}

type report func(err error, stack string)

// panicked reports the value of a panic, and returns the error of the request.
func (report report) panicked(value any) error {
	err := fmt.Errorf("redlatch: a hook of the connection has panicked: %v", value)
	report(err, string(debug.Stack()))
	return err
}

// Do implements rueidis.Client.
func (g guard) Do(ctx context.Context, cmd rueidis.Completed) (reply rueidis.RedisResult) {
	defer func() {
		if v := recover(); v != nil {
			reply = rueidis.NewErrorResult(g.report.panicked(v))
		}
	}()
	return g.Client.Do(ctx, cmd)
}

// DoMulti implements rueidis.Client.
func (g guard) DoMulti(ctx context.Context, cmds ...rueidis.Completed) (replies []rueidis.RedisResult) {
	defer func() {
		if v := recover(); v != nil {
			replies = all(g.report.panicked(v), len(cmds))
		}
	}()
	return g.Client.DoMulti(ctx, cmds...)
}

// Nodes implements rueidis.Client.
func (g guard) Nodes() map[string]rueidis.Client {
	nodes := make(map[string]rueidis.Client)
	for addr, node := range g.Client.Nodes() {
		nodes[addr] = guard{node, g.report}
	}
	return nodes
}

// Dedicate implements rueidis.Client.
func (g guard) Dedicate() (rueidis.DedicatedClient, func()) {
	conn, release := g.Client.Dedicate()
	return guardedConn{conn, g.report}, release
}

// Do implements rueidis.DedicatedClient.
func (g guardedConn) Do(ctx context.Context, cmd rueidis.Completed) (reply rueidis.RedisResult) {
	defer func() {
		if v := recover(); v != nil {
			reply = rueidis.NewErrorResult(g.report.panicked(v))
		}
	}()
	return g.DedicatedClient.Do(ctx, cmd)
}

// DoMulti implements rueidis.DedicatedClient.
func (g guardedConn) DoMulti(ctx context.Context, cmds ...rueidis.Completed) (replies []rueidis.RedisResult) {
	defer func() {
		if v := recover(); v != nil {
			replies = all(g.report.panicked(v), len(cmds))
		}
	}()
	return g.DedicatedClient.DoMulti(ctx, cmds...)
}

// all returns the replies of n requests that have failed with err.
func all(err error, n int) []rueidis.RedisResult {
	return slices.Repeat([]rueidis.RedisResult{rueidis.NewErrorResult(err)}, n)
}
