package etcdlock

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/redlatch/redlatch/lock"
)

const (
	// minTimeout, firstTimeout and maxTimeout bound the time that an attempt has for an answer. It begins with a fifth of
	// the TTL, so that there is time for others, and is doubled once each member may have been asked.
	minTimeout   = 400 * time.Millisecond
	firstTimeout = 2 * time.Second
	maxTimeout   = 8 * time.Second

	// minPause and maxPause bound the pause between two attempts.
	minPause = 25 * time.Millisecond
	maxPause = time.Second
)

var (
	errNoAnswer     = errors.New("etcd did not answer in time")
	errNoConnection = errors.New("there is no connection to etcd")
	errClientClosed = errors.Join(lock.ErrClosed, errors.New("the client of etcd is closed"))
)

// requireLeader has a member refuse a request, and end a watch, while it has no leader.
var requireLeader = metadata.Pairs(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)

// call makes a request that can be repeated until etcd answers or ctx ends. After an attempt without an answer the next ones
// ask two members at once: a single one could be the one that hangs again and again, because the balancer of the client of
// etcd lets requests take turns. With failFast, call gives up when it has asked as many members as there are endpoints, or
// while no endpoint can be reached.
//
// It reports whether an attempt without an answer may have had an effect. The error is one of ask.
func call[T any](
	ctx context.Context, s *store, failFast bool, request func(ctx context.Context) (T, error),
) (answer T, unknown bool, err error) {
	return attempts(ctx, s, failFast, 1, request)
}

// attempts is call, and asks that many members at first.
func attempts[T any](
	ctx context.Context, s *store, failFast bool, members int, request func(ctx context.Context) (T, error),
) (answer T, unknown bool, err error) {
	timeout := s.timeout
	pause := minPause
	for asked := members; ; asked += members {
		answer, err = ask(ctx, s, failFast, timeout, members, request)
		if err == nil || !again(err) {
			return answer, unknown, err
		}
		all := asked >= len(s.c.Endpoints())
		if errors.Is(err, lock.ErrIndeterminate) {
			unknown = true
			members = 2
			if all {
				timeout = min(2*timeout, maxTimeout)
			}
		}
		if unknown && errors.Is(err, lock.ErrUnavailable) {
			err = as(lock.ErrIndeterminate, err)
		}
		if ctx.Err() != nil || failFast && (all || errors.Is(err, errNoConnection)) {
			return answer, unknown, err
		}

		if !sleep(ctx, pause) {
			return answer, unknown, err
		}
		pause = min(2*pause, maxPause)
	}
}

// sleep pauses, and reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// again reports whether the request may be answered if it is repeated.
func again(err error) bool {
	return errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
}

// ask makes a request of several members at once, if there are as many endpoints, and returns the first answer. The error
// matches lock.ErrUnavailable if the request has had no effect and another attempt may succeed, lock.ErrIndeterminate if
// it may have had an effect, and lock.ErrClosed if the client of etcd is closed. Other errors are refusals.
func ask[T any](
	ctx context.Context, s *store, failFast bool, timeout time.Duration, members int, request func(ctx context.Context) (T, error),
) (answer T, err error) {
	if err := s.connected(ctx, failFast, timeout); err != nil {
		return answer, err
	}
	if ctx.Err() != nil {
		return answer, errors.Join(lock.ErrUnavailable, errNoAnswer)
	}

	// What the caller's context tells the servers that the caller calls is nothing for etcd.
	attempt, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, requireLeader), timeout)
	defer cancel()
	members = min(members, len(s.c.Endpoints()))
	if members <= 1 {
		answer, err = request(attempt)
		return answer, classify(err)
	}

	type reply struct {
		answer T
		err    error
	}
	replies := make(chan reply, members)
	for range members {
		go func() {
			answer, err := request(attempt)
			replies <- reply{answer, classify(err)}
		}()
	}
	answered := false
	for range members {
		r := <-replies
		if answered {
			continue
		}
		answered = r.err == nil || !again(r.err)
		if answered {
			cancel() // which ends the others
		}
		if answered || err == nil || errors.Is(r.err, lock.ErrIndeterminate) {
			answer = r.answer
			err = r.err
		}
	}
	return answer, err
}

// connected waits for a connection, so that a request that was never sent is not taken for one without an answer. With
// failFast it does not wait while the connections to all endpoints fail, nor longer than the timeout: a connection to a host
// that does not answer takes 20 seconds to fail.
func (s *store) connected(ctx context.Context, failFast bool, timeout time.Duration) error {
	if failFast {
		short, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		ctx = short
	}
	conn := s.c.ActiveConnection()
	for {
		if s.c.Ctx().Err() != nil {
			return errClientClosed
		}
		if conn == nil { // the client is not one of the network
			return nil
		}

		state := conn.GetState()
		if state == connectivity.Ready {
			return nil
		}
		if state == connectivity.Idle {
			conn.Connect()
		}
		if failFast && state == connectivity.TransientFailure || !conn.WaitForStateChange(ctx, state) {
			return errors.Join(lock.ErrUnavailable, errNoConnection)
		}
	}
}

// waited returns the error of a wait that is over: others have the lock, unless etcd could not be asked any more.
func (s *store) waited(l *lease) error {
	s.mu.Lock()
	err := l.err
	s.mu.Unlock()
	if conn := s.c.ActiveConnection(); conn != nil && conn.GetState() != connectivity.Ready {
		err = errors.Join(lock.ErrUnavailable, errNoConnection)
	}
	if again(err) {
		return as(lock.ErrUnavailable, err)
	}
	return lock.ErrNotAcquired
}

// watching returns the context of watches. Those with the same number share a stream to one member.
func (s *store) watching(stream int64) context.Context {
	return metadata.NewOutgoingContext(s.ctx, metadata.Join(requireLeader, metadata.Pairs("redlatch-stream", strconv.FormatInt(stream, 10))))
}

// reconnect has the connections try again at once, which otherwise wait for up to two minutes after an outage.
func (s *store) reconnect() {
	if conn := s.c.ActiveConnection(); conn != nil && conn.GetState() == connectivity.TransientFailure {
		conn.ResetConnectBackoff()
	}
}

// turnedAway are the answers to a request that has had no effect, and that may have one later, or on another member.
var turnedAway = []error{
	rpctypes.ErrNoLeader, rpctypes.ErrNotLeader, rpctypes.ErrTooManyRequests, rpctypes.ErrNotCapable,
	rpctypes.Error(rpctypes.ErrGRPCNotSupportedForLearner),
	rpctypes.ErrAuthFailed, rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision,
}

// unknownOutcome are the codes of answers to a request that may have had an effect.
var unknownOutcome = []codes.Code{
	codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown,
}

// classify returns an error of ask for an error of the client of etcd.
func classify(err error) error {
	if err == nil {
		return nil
	}

	err = rpctypes.Error(err)
	for _, answer := range turnedAway {
		if errors.Is(err, answer) {
			return errors.Join(lock.ErrUnavailable, err)
		}
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return errors.Join(lock.ErrIndeterminate, errNoAnswer)
	}

	code := status.Code(err)
	if known := (rpctypes.EtcdError{}); errors.As(err, &known) {
		code = known.Code()
	}
	if slices.Contains(unknownOutcome, code) {
		return errors.Join(lock.ErrIndeterminate, err)
	}
	return err
}

// as returns an error of ask as one of another kind. A refusal remains one.
func as(kind, err error) error {
	if !again(err) {
		return err
	}
	return errors.Join(kind, cause(err))
}

// cause returns what etcd, or its client, has said of an error of ask.
func cause(err error) error {
	if both, ok := err.(interface{ Unwrap() []error }); ok {
		return both.Unwrap()[1]
	}
	return err
}
