package etcdlock

import (
	"cmp"
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
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

// follow waits until fewer claims than there are permits are ahead, as far as a watch tells, and returns the queue as it
// is then. It also returns if the watch fails.
//
// The watch begins with the revision that etcd has when it gets the request. The events since the queue was read would come
// with a delay of up to 100 ms, so follow reads the queue again if there may be some.
func (c *claim) follow(ctx context.Context, q queue) (queue, error) {
	stream := c.s.streams.Load()
	watched, cancel := context.WithCancel(c.s.watching(stream))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	defer context.AfterFunc(c.home.ctx, cancel)()

	key := c.rivals.from
	opts := []clientv3.OpOption{clientv3.WithCreatedNotify(), clientv3.WithFilterPut()}
	if c.permits > 1 {
		opts = append(opts, clientv3.WithRange(c.rivals.to))
	} else {
		for only := range q.ahead {
			key = only
		}
	}
	slow := time.AfterFunc(2*c.s.timeout, cancel)
	events := c.s.c.Watch(watched, key, opts...)
	if !slow.Stop() {
		c.s.streams.CompareAndSwap(stream, stream+1)
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
			if !includes(now.ahead, q.ahead) {
				// The member that has the watch hangs, unless the event is under way.
				c.s.streams.CompareAndSwap(stream, stream+1)
				return now, nil
			}
		case resp, ok := <-events:
			if !ok || resp.Err() != nil { // its revision was compacted, or the member has no leader
				select {
				case <-time.After(minPause):
				case <-ctx.Done():
				}
				return c.look(ctx)
			}
			if resp.Created && resp.Header.Revision > q.revision {
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
