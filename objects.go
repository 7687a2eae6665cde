package redlatch

import (
	"cmp"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/grouplock"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/once"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/rlock"
	"github.com/redlatch/redlatch/rwlock"
	"github.com/redlatch/redlatch/semaphore"
)

// Lock returns the reentrant lock of that name. It sends nothing and does not fail: for an
// empty name, or an option that is nil, every method that contacts the
// server returns an error that matches lock.ErrInvalid. The same applies in a
// cluster to a name whose braces would spread its keys over several slots. On a single server
// a name may contain any braces.
func (c *Client) Lock(name string, opts ...rlock.Option) *rlock.Lock {
	return rlock.New(c.engine, name, opts...)
}

// FencedLock returns the fenced lock of that name, whose holds have a fencing token.
// Names are as for Lock.
func (c *Client) FencedLock(name string, opts ...rlock.Option) *rlock.Fenced {
	return rlock.NewFenced(c.engine, name, opts...)
}

// FairLock returns the fair lock of that name, which serves the waiters of all
// processes in order of arrival. Names are as for Lock. It sends nothing.
func (c *Client) FairLock(name string, opts ...fairlock.Option) *fairlock.Lock {
	return fairlock.New(c.engine, name, opts...)
}

// RWLock returns the read-write lock of that name, which either many readers or one
// writer can hold. Names are as for Lock. It sends nothing.
func (c *Client) RWLock(name string) *rwlock.RWLock { return rwlock.New(c.engine, name) }

// Semaphore returns the semaphore of that name, whose permits have no identity. Names
// are as for Lock. With semaphore.Permits its requests create it on the server. It sends nothing.
func (c *Client) Semaphore(name string, opts ...semaphore.Option) *semaphore.Semaphore {
	return semaphore.New(c.semaphores, name, opts...)
}

// PermitSemaphore returns the permit-expirable semaphore of that name, whose permits
// return when their process dies. Names are as for Lock. With semaphore.Permits its requests
// create it on the server. It sends nothing.
func (c *Client) PermitSemaphore(name string, opts ...semaphore.Option) *semaphore.PermitSemaphore {
	return semaphore.NewPermitSemaphore(c.semaphores, name, opts...)
}

// RateLimiter returns the rate limiter of that name. Names are as for Lock. With ratelimit.Rate its
// requests create it on the server. It sends nothing.
func (c *Client) RateLimiter(name string, opts ...ratelimit.Option) *ratelimit.Limiter {
	return ratelimit.New(c.limiters, name, opts...)
}

// CountDownLatch returns the count-down latch of that name, which releases its waiters
// when its count reaches zero. Names are as for Lock, but with sharded pub/sub no name may
// contain braces: they would give the latch's channel another cluster slot. It sends nothing.
func (c *Client) CountDownLatch(name string) *countdown.Latch { return countdown.New(c.latches, name) }

// Election returns the leader election of that name. Its candidates wait for the fair lock of the
// same name. Names are as for Lock. It sends nothing.
func (c *Client) Election(name string) *election.Election {
	return election.New(c.engine, name)
}

// Once returns the work of that name, which is to run once for each slot although several machines
// start it. Names are as for Lock. It sends nothing.
func (c *Client) Once(name string, opts ...once.Option) *once.Once {
	return once.New(c.engine, name, opts...)
}

// PlainLock returns the plain lock of that name, which excludes the locks of redsync,
// redislock and other libraries that set a key. Names are as for Lock. A backoff bounds the pauses of its waiters; the
// last one wins, and the default is in package rlock. It sends nothing.
func (c *Client) PlainLock(name string, backoff ...rlock.Backoff) *rlock.Plain {
	return rlock.NewPlain(c.engine, name, backoff...)
}

// SpinLock returns the spin lock of that name, which polls instead of using pub/sub.
// Names are as for Lock. A backoff replaces the pauses of its waiters, by default Redisson's; the last one
// wins.
func (c *Client) SpinLock(name string, backoff ...rlock.Backoff) *rlock.Spin {
	return rlock.NewSpin(c.engine, name, backoff...)
}

// MultiLock returns a lock that acquires all of the given locks, which may be of any
// kind and client. It sends nothing and does not fail: without members, or with a member
// that is nil, a duplicate, or of another module's type, every method returns an error.
func (c *Client) MultiLock(members ...lock.Locker) *multilock.Multi {
	return multilock.New(c.groups, members...)
}

// GroupLock returns the lock of all of the values, of the group of that name. Locks of the same group exclude each
// other if they have a value in common. The values are bytes: package grouplock says which ones Java has. Their order
// does not matter, and one that is repeated counts once. Names are as for Lock. It sends nothing and does not fail:
// without values, or with more than 1,000, every method returns an error that matches lock.ErrInvalid.
func (c *Client) GroupLock(name string, values ...string) *grouplock.Lock {
	return grouplock.New(c.engine, name, values...)
}

// RedLock returns a lock that acquires a majority of the reentrant locks of one name on
// several clients: it is
//
//	clients[0].RedLock([]lock.Locker{clients[0].Lock(name), clients[1].Lock(name), ...}, opts...)
//
// For locks of another kind, such as PlainLock, and for the rules, see Client.RedLock.
// Without clients, or with a client that is nil or a duplicate, every method returns an error
// that matches lock.ErrInvalid.
func RedLock(name string, clients []*Client, opts ...multilock.Option) *multilock.Red {
	var first *multilock.Shared
	members := make([]lock.Locker, len(clients))
	for i, c := range clients {
		if c != nil {
			members[i] = c.Lock(name)
			first = cmp.Or(first, c.groups)
		}
	}

	return multilock.NewRed(first, members, opts...)
}

// RedLock returns a lock that acquires a majority of the given locks. Each must belong to
// another client with its own server, and usually all have the same name. Client c may be one
// of these clients. Its watchdog timeout is the lease unless lock.Lease is given, its watchdog
// renews all members, and its Close loses the holds. Closing another client costs only the
// vote of its server.
//
// RedLock sends nothing and does not fail, like MultiLock. Use an odd number of servers: an
// even number adds no fault tolerance, and is logged. multilock.Absent is for servers that are down.
func (c *Client) RedLock(members []lock.Locker, opts ...multilock.Option) *multilock.Red {
	return multilock.NewRed(c.groups, members, opts...)
}
