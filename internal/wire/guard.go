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

// recovered has to be deferred. If a request has panicked, it calls fail with the error.
func (report report) recovered(fail func(err error)) {
	if v := recover(); v != nil {
		err := fmt.Errorf("redlatch: a hook of the connection has panicked: %v", v)
		report(err, string(debug.Stack()))
		fail(err)
	}
}

// Do implements rueidis.Client.
func (g guard) Do(ctx context.Context, cmd rueidis.Completed) (reply rueidis.RedisResult) {
	defer g.report.recovered(func(err error) { reply = rueidis.NewErrorResult(err) })
	return g.Client.Do(ctx, cmd)
}

// DoMulti implements rueidis.Client.
func (g guard) DoMulti(ctx context.Context, cmds ...rueidis.Completed) (replies []rueidis.RedisResult) {
	defer g.report.recovered(func(err error) { replies = all(err, len(cmds)) })
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
	defer g.report.recovered(func(err error) { reply = rueidis.NewErrorResult(err) })
	return g.DedicatedClient.Do(ctx, cmd)
}

// DoMulti implements rueidis.DedicatedClient.
func (g guardedConn) DoMulti(ctx context.Context, cmds ...rueidis.Completed) (replies []rueidis.RedisResult) {
	defer g.report.recovered(func(err error) { replies = all(err, len(cmds)) })
	return g.DedicatedClient.DoMulti(ctx, cmds...)
}

// all returns the replies of n requests that have failed with err.
func all(err error, n int) []rueidis.RedisResult {
	return slices.Repeat([]rueidis.RedisResult{rueidis.NewErrorResult(err)}, n)
}
