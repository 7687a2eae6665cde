package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/redlatch/redlatch/lock"
)

// rivals is a range of keys: the claims that exclude a claim if they are ahead of it.
type rivals struct{ from, to string }

// queue is what is ahead of a claim at a revision of etcd. With a single permit it is only the last one.
type queue struct {
	ahead    map[string]struct{}
	revision int64
}

// question asks for the rivals that are ahead.
func (c *claim) question(opts ...clientv3.OpOption) clientv3.Op {
	opts = append(opts, clientv3.WithRange(c.rivals.to), clientv3.WithKeysOnly())
	if c.permits == 1 {
		opts = append(opts, clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	}
	return clientv3.OpGet(c.rivals.from, opts...)
}

// queue returns the answer to question.
func (c *claim) queue(ahead []*mvccpb.KeyValue, revision int64) queue {
	q := queue{make(map[string]struct{}, len(ahead)), revision}
	for _, kv := range ahead {
		q.ahead[string(kv.Key)] = struct{}{}
	}
	return q
}

// with makes the key with a lease, or gives it that lease.
func (c *claim) with(l *lease) clientv3.Op {
	return clientv3.OpPut(c.key, c.r.Owner.String(), clientv3.WithLease(l.id))
}

// put makes the key if all conditions are met, and reports whether it exists: a request whose reply was lost may have made it,
// too. answer is the answer to question, of just before; it is nil if question is, or if it was such a request.
func (c *claim) put(ctx context.Context, question *clientv3.Op, conditions ...clientv3.Cmp) (exists bool, answer *queue, err error) {
	then := make([]clientv3.Op, 0, 2)
	if question != nil {
		then = append(then, *question)
	}
	then = append(then, c.with(c.home))
	all := append(conditions, clientv3.Compare(clientv3.CreateRevision(c.key), "=", 0))

	resp, unknown, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return c.s.c.Txn(ctx).If(all...).Then(then...).Commit()
	})
	if unknown {
		c.sent = true
		c.unknown = true
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		c.s.gone(c.home, err)
		return false, nil, errAgain
	}
	if err != nil {
		return false, nil, err
	}
	if !resp.Succeeded {
		if len(conditions) == 0 || c.unknown {
			exists, err = c.made(ctx)
		}
		return exists, nil, err
	}

	c.sent = true
	c.rev = resp.Header.Revision
	c.mod = c.rev
	if question != nil {
		q := c.queue(resp.Responses[0].GetResponseRange().Kvs, c.rev)
		answer = &q
	}
	return true, answer, nil
}

// made reports whether the key exists, although no request is known to have made it, and notes its revisions.
func (c *claim) made(ctx context.Context) (bool, error) {
	own, _, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.s.c.Get(ctx, c.key, clientv3.WithKeysOnly())
	})
	if err != nil {
		return false, as(lock.ErrIndeterminate, err)
	}
	if len(own.Kvs) == 0 {
		return false, nil
	}
	c.sent = true
	c.rev = own.Kvs[0].CreateRevision
	c.mod = own.Kvs[0].ModRevision
	return true, nil
}

// try makes the key unless rivals exist, which would be ahead of it.
func (c *claim) try(ctx context.Context) error {
	free := clientv3.Compare(clientv3.CreateRevision(c.rivals.from), "=", 0).WithRange(c.rivals.to)
	exists, _, err := c.put(ctx, nil, free)
	if err == nil && !exists {
		return lock.ErrNotAcquired
	}
	return err
}

// tryPermit makes the key if fewer rivals than there are permits exist: it counts them, and makes the key if none was made
// since.
func (c *claim) tryPermit(ctx context.Context) error {
	for {
		others, _, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.GetResponse, error) {
			return c.s.c.Get(ctx, c.rivals.from, clientv3.WithRange(c.rivals.to), clientv3.WithKeysOnly(),
				clientv3.WithLimit(int64(c.permits)))
		})
		if err != nil {
			return as(lock.ErrUnavailable, err)
		}
		if len(others.Kvs) >= c.permits {
			return lock.ErrNotAcquired
		}

		same := clientv3.Compare(clientv3.CreateRevision(c.rivals.from), "<", others.Header.Revision+1).WithRange(c.rivals.to)
		exists, _, err := c.put(ctx, nil, same)
		if exists || err != nil {
			return err
		}
	}
}

// wait makes the key and waits until the claim is granted.
func (c *claim) wait(ctx context.Context) error {
	question := c.question()
	exists, answer, err := c.put(ctx, &question)
	if err != nil || !exists {
		return cmp.Or(err, errAgain)
	}

	var q queue
	if answer != nil {
		q = *answer
	} else {
		q, err = c.look(ctx)
	}
	for err == nil && len(q.ahead) >= c.permits {
		q, err = c.follow(ctx, q)
	}
	return err
}

// look returns the queue as it is now. The error is errAgain if the key does not exist any more.
func (c *claim) look(ctx context.Context) (queue, error) {
	own := clientv3.OpGet(c.key, clientv3.WithKeysOnly())
	resp, _, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return c.s.c.Txn(ctx).Then(own, c.question(clientv3.WithMaxCreateRev(c.rev-1))).Commit()
	})
	if err != nil && ctx.Err() != nil {
		return queue{}, c.s.waited(c.home)
	}
	if err != nil {
		return queue{}, as(lock.ErrUnavailable, err)
	}

	if resp.Responses[0].GetResponseRange().Count == 0 {
		return queue{}, errAgain
	}
	return c.queue(resp.Responses[1].GetResponseRange().Kvs, resp.Header.Revision), nil
}

// watch watches what is ahead, until stop is called, ctx ends or the session does. hangs has later watches use another
// connection. If the member that is asked hangs, events is nil.
//
// The watch begins with the revision that etcd has when it gets the request. The events since the queue was read would come
// with a delay of up to 100 ms.
func (c *claim) watch(ctx context.Context, q queue) (events clientv3.WatchChan, hangs, stop func()) {
	stream := c.s.streams.Load()
	watched, cancel := context.WithCancel(c.s.watching(stream))
	left := context.AfterFunc(ctx, cancel)
	ended := context.AfterFunc(c.home.ctx, cancel)
	hangs = func() { c.s.streams.CompareAndSwap(stream, stream+1) }
	stop = func() { left(); ended(); cancel() }

	key := c.rivals.from
	opts := []clientv3.OpOption{clientv3.WithCreatedNotify(), clientv3.WithFilterPut()}
	if c.permits > 1 {
		opts = append(opts, clientv3.WithRange(c.rivals.to))
	} else {
		for only := range q.ahead { // a single one
			key = only
		}
	}
	slow := time.AfterFunc(2*c.s.timeout, cancel)
	events = c.s.c.Watch(watched, key, opts...)
	if !slow.Stop() {
		hangs()
		return nil, hangs, stop
	}
	return events, hangs, stop
}

// follow waits until fewer claims than there are permits are ahead, as far as a watch tells, and returns the queue as it
// is then. It also returns if the watch fails.
func (c *claim) follow(ctx context.Context, q queue) (queue, error) {
	events, hangs, stop := c.watch(ctx, q)
	defer stop()
	if events == nil {
		return c.look(ctx)
	}

	check := time.NewTicker(c.s.ttl / 2)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return queue{}, c.s.waited(c.home)
		case <-c.home.ctx.Done():
			return queue{}, errAgain
		case <-check.C:
			now, err := c.look(ctx)
			if err != nil {
				return queue{}, err
			}
			if !includes(now.ahead, q.ahead) { // the member that has the watch hangs, unless the event is under way
				hangs()
				return now, nil
			}
		case resp, ok := <-events:
			if !ok || resp.Err() != nil { // its revision was compacted, or the member has no leader
				sleep(ctx, minPause)
				return c.look(ctx)
			}
			if resp.Created && resp.Header.Revision > q.revision { // there may have been events before
				now, err := c.look(ctx)
				if err != nil || len(now.ahead) < c.permits || c.permits == 1 && !includes(now.ahead, q.ahead) {
					return now, err
				}
				q = now
			}
			for _, event := range resp.Events {
				delete(q.ahead, string(event.Kv.Key))
			}
			if len(q.ahead) < c.permits {
				return c.look(ctx)
			}
		}
	}
}

// includes reports whether all keys of some are in all.
func includes(all, some map[string]struct{}) bool {
	for key := range some {
		if _, ok := all[key]; !ok {
			return false
		}
	}
	return true
}
