package zklock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/redlatch/redlatch/lock"
)

// errLeft is the error of a request without an answer when its context ended.
var errLeft = errors.New("the answer is outstanding")

// ask makes a request, which cannot be cancelled. If ctx ends first, ask returns errLeft, and the request goes on.
func ask[T any](ctx context.Context, request func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	results := make(chan result, 1)
	go func() {
		value, err := request()
		results <- result{value, err}
	}()

	select {
	case r := <-results:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, errLeft
	}
}

// refusals are the errors with which a server, or go-zookeeper before it sends anything, refuses a request.
var refusals = []error{
	zk.ErrNoNode, zk.ErrNodeExists, zk.ErrNotEmpty, zk.ErrBadVersion, zk.ErrNoAuth, zk.ErrAuthFailed, zk.ErrInvalidACL,
	zk.ErrNoChildrenForEphemerals, zk.ErrAPIError, zk.ErrNothing, zk.ErrBadArguments, zk.ErrReconfigDisabled, zk.ErrUnknown,
	zk.ErrInvalidPath, zk.ErrInvalidFlags, zk.ErrShortBuffer,
}

// throttled is what a server says that has too many requests. go-zookeeper does not know the code.
const throttled = "unknown error: -127"

// isRefusal reports whether a request has failed for good.
func isRefusal(err error) bool {
	text := err.Error()
	return slices.Contains(refusals, err) || strings.HasPrefix(text, "unknown error") && text != throttled
}

// isWithoutEffect reports whether a request has failed before it had an effect, or its effect has ended with its session.
func isWithoutEffect(err error) bool {
	return err == zk.ErrNoServer || err == zk.ErrSessionExpired || err == zk.ErrSessionMoved || err.Error() == throttled
}

// unavailable returns an error that matches lock.ErrUnavailable. An error of the network is only part of the text: the
// timeouts of the client are not the caller's.
func unavailable(err error) error {
	if err == errNotConnected {
		return err
	}
	if isWithoutEffect(err) || err == zk.ErrConnectionClosed || err == zk.ErrClosing {
		return fmt.Errorf("%w: %w", lock.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %v", lock.ErrUnavailable, err)
}

// indeterminate is unavailable for lock.ErrIndeterminate.
func indeterminate(err error) error {
	if err == zk.ErrConnectionClosed || err == zk.ErrClosing {
		return fmt.Errorf("%w: %w", lock.ErrIndeterminate, err)
	}
	return fmt.Errorf("%w: %v", lock.ErrIndeterminate, err)
}

// errNotConnected is why a store cannot be asked.
var errNotConnected = fmt.Errorf("%w: there is no connection to ZooKeeper", lock.ErrUnavailable)

// errDisconnected is returned for a store whose connection the program has closed.
var errDisconnected = fmt.Errorf("%w: the connection to ZooKeeper is closed", lock.ErrClosed)

// ready blocks until the store has a connection, and returns its session. With once it does not wait.
func (s *store) ready(ctx context.Context, once bool) (sessionState, error) {
	for {
		now, changed := s.session.state()
		if now.closed {
			return now, errDisconnected
		}
		if now.connected {
			return now, nil
		}
		if once {
			return now, errNotConnected
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return now, errNotConnected
		case <-time.After(closedPause):
			// Nothing is written if the program closes a connection that has no server. go-zookeeper is disconnected
			// then, and fails each request at once. Else it keeps requests until it has tried each server.
			if s.conn.State() == zk.StateDisconnected {
				_, err := ask(ctx, func() (string, error) { return s.conn.Sync("/") })
				if err == zk.ErrConnectionClosed {
					return now, errDisconnected
				}
			}
		}
	}
}

// closedPause is the pause between two looks whether the program has closed a connection that has no server.
const closedPause = time.Second

// retryPause is the pause after a request that has failed although the store has a connection.
const retryPause = 20 * time.Millisecond

// refusedPause is the pause before a request that the server has refused.
const refusedPause = time.Second

// pause blocks for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// check asks whether nodes of a session exist, by a write that changes nothing: a majority of the servers has to confirm
// it, and the leader, which ends sessions, refuses it if the session is over. A server that the others do not hear any
// more still answers reads. check returns the indexes of nodes that do not exist.
func (s *store) check(ctx context.Context, now sessionState, paths ...string) (missing []int, err error) {
	ops := make([]any, len(paths))
	for i, path := range paths {
		ops[i] = &zk.CheckVersionRequest{Path: path, Version: -1}
	}

	sent := time.Now()
	results, err := ask(ctx, func() ([]zk.MultiResponse, error) { return s.conn.Multi(ops...) })
	if err == nil {
		s.confirm(now.number, sent)
		return nil, nil
	}
	for i, result := range results {
		if result.Error == zk.ErrNoNode {
			missing = append(missing, i)
		}
	}
	if missing != nil {
		return missing, nil
	}
	return nil, err
}

// remove deletes a node. It reports whether the node was there.
func (s *store) remove(ctx context.Context, path string) (bool, error) {
	_, err := ask(ctx, func() (struct{}, error) { return struct{}{}, s.conn.Delete(path, -1) })
	if err == zk.ErrNoNode {
		return false, nil
	}
	return err == nil, err
}

// children returns the names of the nodes in a folder.
func (s *store) children(ctx context.Context, folder string) ([]string, error) {
	return ask(ctx, func() ([]string, error) {
		names, _, err := s.conn.Children(folder)
		return names, err
	})
}

// createFolder creates a folder, and those above it. The server removes a container soon after its last node.
func (s *store) createFolder(ctx context.Context, path string) error {
	create := func() (string, error) { return s.conn.CreateContainer(path, nil, zk.FlagContainer, s.acl) }
	_, err := ask(ctx, create)
	if parent := path[:strings.LastIndexByte(path, '/')]; err == zk.ErrNoNode && parent != "" {
		if err := s.createFolder(ctx, parent); err != nil {
			return err
		}
		_, err = ask(ctx, create)
	}
	if err == zk.ErrNodeExists {
		return nil
	}
	return err
}

// watch is a watch of a node, which all calls share that wait for it.
type watch struct {
	changed  <-chan struct{} // of the session, from before the request
	answered chan struct{}   // closed when events and err are set
	events   <-chan zk.Event // gets a value, or is closed, when the node is gone, has changed, or is not watched any more
	err      error           // zk.ErrNoNode if the node does not exist
}

// over reports whether a watch is of no use for a new call.
func (w *watch) over() bool {
	select {
	case <-w.answered:
		return w.err != nil || len(w.events) > 0
	default:
		return false
	}
}

// shows reports whether the server has shown the node, and has not said since that it is gone or has changed. It takes the
// event if that has come; calls that wait for it see that the channel is closed.
func (w *watch) shows() bool {
	select {
	case <-w.answered:
	default:
		return false
	}
	select {
	case <-w.events:
		return false
	default:
		return w.err == nil
	}
}

// watch watches a node, on the connection that lasts until changed is closed.
//
// go-zookeeper cannot remove a watch. Calls share it also with calls that have ended: while a lock is held for long, any
// number of calls that wait for a moment leave one watch.
func (s *store) watch(ctx context.Context, path string, changed <-chan struct{}) (*watch, error) {
	s.mu.Lock()
	w := s.watches[path]
	if w == nil || w.changed != changed || w.over() {
		if len(s.watches) >= s.watchesMost {
			maps.DeleteFunc(s.watches, func(_ string, w *watch) bool { return w.changed != changed || w.over() })
			s.watchesMost = 2*len(s.watches) + minWatches
		}
		w = &watch{changed: changed, answered: make(chan struct{})}
		s.watches[path] = w
		go func() {
			_, _, w.events, w.err = s.conn.GetW(path)
			close(w.answered)
		}()
	}
	s.mu.Unlock()

	select {
	case <-w.answered:
		return w, w.err
	case <-ctx.Done():
		return nil, errLeft
	}
}

// minWatches is how many watches there are at least before those that are over are removed.
const minWatches = 64

// watched removes a watch whose event was received.
func (s *store) watched(path string, w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watches[path] == w {
		delete(s.watches, path)
	}
}
