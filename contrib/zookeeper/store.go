package zklock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// store is a driver.Driver.
type store struct {
	conn    *zk.Conn
	session *Session
	prefix  string
	acl     []zk.ACL

	ctx    context.Context // ends when Close has waited long enough
	cancel context.CancelFunc
	wake   chan struct{}  // has a value if keep has to look at the claims
	kept   chan struct{}  // closed when keep has returned
	work   sync.WaitGroup // of clean
	ending sync.Mutex     // locked while claims end

	mu          sync.Mutex
	closed      bool
	claims      map[string]*claim // by path: those whose nodes should be there
	number      uint64            // of the session that confirmed is about
	confirmed   time.Time         // when the latest write was sent that is confirmed
	watches     map[string]*watch // by path
	watchesMost int
}

func newStore(conn *zk.Conn, session *Session, prefix string, acl []zk.ACL) *store {
	s := &store{
		conn: conn, session: session, prefix: prefix, acl: acl,
		wake: make(chan struct{}, 1), kept: make(chan struct{}),
		claims: make(map[string]*claim), watches: make(map[string]*watch),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	session.attach(s)
	go s.keep()
	return s
}

// Store implements driver.Driver.
func (s *store) Store() string { return "zookeeper" }

// CheckName implements driver.Driver.
func (s *store) CheckName(name string) error { return checkName(name) }

// maxPermits bounds the nodes that a waiter of a semaphore watches.
const maxPermits = 10_000

// Acquire implements driver.Driver.
func (s *store) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	if r.Permits > maxPermits {
		return nil, fmt.Errorf("%w: %d permits: at most %d", lock.ErrInvalid, r.Permits, maxPermits)
	}

	var unknown error // of an attempt that may have left a node
	for attempt := 1; ; attempt++ {
		c, err := s.attempt(ctx, &r, attempt)
		if err == nil {
			return c, nil
		}

		if errors.Is(err, lock.ErrIndeterminate) {
			unknown = err
		} else if unknown != nil && errors.Is(err, errNotConnected) {
			err = unknown
		}
		passes := errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
		if !passes || ctx.Err() != nil || r.Try || r.FailFast && err != errRemoved {
			return nil, err
		}
		pause(ctx, retryPause)
	}
}

// attempt queues a node, and waits for its turn. After a failure the node is removed in the background.
func (s *store) attempt(ctx context.Context, r *driver.Request, number int) (*claim, error) {
	now, err := s.ready(ctx, r.Try || r.FailFast)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	short := ctx // of requests while there is no claim, for which keep would leave a server that does not answer
	if r.Try || r.FailFast {
		var cancel context.CancelFunc
		short, cancel = context.WithTimeout(ctx, patience(now))
		defer cancel()
	}
	c := &claim{s: s, r: *r, in: folder(s.prefix, r), session: now.number, end: end}
	if err := s.enqueue(short, c, nodeName(r, number)); err != nil {
		return nil, err
	}

	err = s.await(ctx, c)
	if err == nil {
		return c, nil
	}
	if !s.forget(c) {
		return nil, err
	}
	if r.Try && err == lock.ErrNotAcquired {
		// The next call that does not wait must not find this one.
		if _, failed := s.remove(short, c.path); failed == nil {
			return nil, err
		}
	}
	s.leave(leftover{path: c.path, session: c.session})
	return nil, err
}

// enqueue creates the node of a claim. The transaction also writes the folder, which has no data: the answer is the
// folder's state with the node in it. So the claim has its token, and is granted at once if nobody else is there.
func (s *store) enqueue(ctx context.Context, c *claim, name string) error {
	for {
		finished := make(chan struct{})
		sent := time.Now()
		results, err := ask(ctx, func() ([]zk.MultiResponse, error) {
			defer close(finished)
			return s.conn.Multi(
				&zk.CreateRequest{Path: c.in + "/" + name, Acl: s.acl, Flags: zk.FlagEphemeralSequential},
				&zk.SetDataRequest{Path: c.in, Version: -1},
			)
		})

		if err == nil {
			return s.queued(c, sent, name, results)
		}
		if err == zk.ErrNoNode {
			err = s.createFolder(ctx, c.in)
			if err == nil || err == zk.ErrNoNode { // one above may have gone again
				continue
			}
		}
		if !isRefusal(err) && !isWithoutEffect(err) {
			s.leave(leftover{folder: c.in, name: name, after: finished}) // a node, or a folder without any
		}
		return notQueued(err)
	}
}

// queued notes that the node of a claim was created.
func (s *store) queued(c *claim, sent time.Time, name string, results []zk.MultiResponse) error {
	if len(results) == 2 && results[1].Stat != nil && len(results[0].String) > len(c.in) {
		c.path = results[0].String
		c.own, _ = parse(c.path[len(c.in)+1:])
	}
	if c.own.name == "" || c.own.sequence < 0 || c.own.sequence > maxSequence {
		s.leave(leftover{folder: c.in, name: name})
		return fmt.Errorf("zookeeper: the numbers of %s are used up; they begin anew after a minute without claims", c.in)
	}

	stat := results[1].Stat
	c.token = stat.Mzxid
	c.alone = int(stat.NumChildren) <= max(1, c.r.Permits)
	s.confirm(c.session, sent)
	err := s.add(c)
	if err != nil {
		s.leave(leftover{folder: c.in, name: name})
	}
	return err
}

// notQueued returns the error of an attempt whose node was not created, or is removed in the background.
func notQueued(err error) error {
	if isRefusal(err) {
		return err
	}
	if isWithoutEffect(err) {
		return unavailable(err)
	}
	return indeterminate(err)
}

// errRemoved is returned if the node of a waiter is gone: its session has ended, or somebody has removed it.
var errRemoved = fmt.Errorf("%w: the node of the waiter is gone", lock.ErrUnavailable)

// errSilent is for calls that do not wait for a store that does not answer.
var errSilent = fmt.Errorf("%w: ZooKeeper does not answer", lock.ErrUnavailable)

// await blocks until it is the turn of a claim.
func (s *store) await(ctx context.Context, c *claim) error {
	for !c.alone {
		nodes, more, err := s.ahead(ctx, c)
		if err != nil {
			return err
		}
		if len(nodes) == 0 {
			break
		}
		if c.r.Try {
			return lock.ErrNotAcquired
		}

		gone, err := s.awaitAny(ctx, c, nodes)
		if err != nil {
			return err
		}
		if gone && !more {
			break // nothing is ever added to what was ahead
		}
	}
	return s.grant(ctx, c)
}

// ahead returns the nodes that a claim has to watch, none if it is granted, and whether there are more ahead of them.
func (s *store) ahead(ctx context.Context, c *claim) (nodes []place, more bool, err error) {
	for {
		names, err := s.children(ctx, c.in)
		if err == nil {
			others, present := ahead(names, c.own, &c.r)
			if !present {
				return nil, false, errRemoved
			}
			nodes := blocking(others, &c.r)
			return nodes, len(others) > len(nodes), nil
		}
		if err := s.again(ctx, c, err); err != nil {
			return nil, false, err
		}
	}
}

// awaitAny blocks until one of the nodes may be gone, and reports whether one is.
func (s *store) awaitAny(ctx context.Context, c *claim, nodes []place) (gone bool, err error) {
	for {
		_, changed := s.session.state()
		cases := make([]reflect.SelectCase, 2, 2+len(nodes))
		cases[0] = reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}
		cases[1] = reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(changed)}
		watches := make([]*watch, len(nodes))
		for i, p := range nodes {
			w, err := s.watch(ctx, c.in+"/"+p.name, changed)
			if err == zk.ErrNoNode {
				return true, nil
			}
			if err != nil {
				return false, s.again(ctx, c, err)
			}
			watches[i] = w
			cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(w.events)})
		}

		i, value, ok := reflect.Select(cases)
		if i == 0 {
			return false, s.over(c)
		}
		if i == 1 {
			// go-zookeeper asks the next server once to watch what it has watched, and nobody hears of a refusal.
			if err := s.reconnected(ctx, c); err != nil {
				return false, err
			}
			continue
		}
		s.watched(c.in+"/"+nodes[i-2].name, watches[i-2])
		return ok && value.Interface().(zk.Event).Type == zk.EventNodeDeleted, nil
	}
}

// again decides what a waiter does after a question has failed with err. It returns nil if it asks again, now that there
// is a connection.
func (s *store) again(ctx context.Context, c *claim, err error) error {
	if cause := c.cause(); cause != nil {
		return cause
	}
	if err == errLeft {
		return s.over(c)
	}
	if err == zk.ErrNoNode {
		return errRemoved
	}
	if isRefusal(err) {
		return err
	}
	if c.r.Try || c.r.FailFast {
		return unavailable(err)
	}

	pause(ctx, retryPause)
	return s.reconnected(ctx, c)
}

// reconnected blocks until there is a connection, for a waiter.
func (s *store) reconnected(ctx context.Context, c *claim) error {
	_, err := s.ready(ctx, false)
	if err == errNotConnected {
		return s.over(c)
	}
	return cmp.Or(c.cause(), err)
}

// over returns the error of a wait that ctx has ended.
func (s *store) over(c *claim) error {
	if cause := c.cause(); cause != nil {
		return cause
	}
	if !time.Now().Before(c.Until()) {
		return errSilent
	}
	return lock.ErrNotAcquired
}

// grant makes a claim one that is held, once it is certain.
func (s *store) grant(ctx context.Context, c *claim) error {
	for {
		if time.Now().Before(c.Until()) {
			return c.hold()
		}

		now, err := s.ready(ctx, c.r.Try || c.r.FailFast)
		if err != nil {
			return err
		}
		if now.number != c.session {
			return errRemoved
		}
		missing, err := s.check(ctx, now, c.path)
		if missing != nil {
			return errRemoved
		}
		if err == nil {
			continue
		}
		if err := s.again(ctx, c, err); err != nil {
			return err
		}
	}
}

// closeTimeout bounds Close.
const closeTimeout = 3 * time.Second

// Close implements driver.Driver.
func (s *store) Close() {
	s.ending.Lock() // or the nodes of claims that expire has ended would stay
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.ending.Unlock()
		return
	}
	s.closed = true
	var ended []*claim
	for _, c := range s.claims {
		s.work.Add(1)
		c.endLocked(lock.ErrClosed)
		ended = append(ended, c)
	}
	s.mu.Unlock()
	s.ending.Unlock()
	for _, c := range ended {
		if c.held {
			c.r.Lost(lock.ReasonClosed, nil)
		}
		go s.clean(leftover{path: c.path, session: c.session})
	}

	cleaned := make(chan struct{})
	go func() {
		s.work.Wait()
		close(cleaned)
	}()
	timer := time.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case <-cleaned:
	case <-timer.C:
	}
	s.cancel()
	<-s.kept
	<-cleaned
	s.session.detach(s)
}
