// Package redlatch is a toolkit of distributed synchronizers on Redis and
// Valkey. It writes the same bytes as Java's Redisson: Go and Java services on
// one server contend for the same locks.
//
// # What is not promised
//
// A lock is a lease, and a lease is not a proof of exclusion:
//
//   - A process can be stopped (by a garbage collector, a debugger, a busy host)
//     between looking at its lease and acting on it. When it goes on, the lease
//     may be over and somebody else may hold the lock. A machine that is
//     suspended stops its monotonic clock too, and then even looking does not
//     tell.
//   - Replication is asynchronous. A failover can bring up a server that has
//     not heard of a lock it acknowledged.
//   - Leases assume that clocks run at about the same rate. A server whose wall
//     clock is set forward ends them early.
//
// Work that merely should not be done twice can live with that. Work that must
// stay correct needs a fencing token that the resource itself checks: see
// Client.FencedLock and rlock.Guard.
//
// # What is promised
//
//   - While a hold's own monotonic clock says that its lease runs, no other
//     client holds the lock, as long as the one primary keeps its data and nobody
//     opens the lock by force. Past that point the hold says so itself: its
//     context ends with a *lock.LostError.
//   - An acquisition that fails or is cancelled leaves nothing behind: no key,
//     no subscription, no renewal. If the server cannot be reached to clean up,
//     the lease bounds how long that takes.
//   - No wait depends on a message. Every one is bounded by an expiry or by a
//     poll, so that lost messages delay a waiter and never strand it.
//
// # Use
//
// One Client serves a process. Objects are cheap, immutable values of a name,
// made where they are used:
//
//	client, err := redlatch.Open(ctx, "redis://localhost:6379")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//
//	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error {
//		return ship(ctx) // ctx ends if the lock is lost
//	})
//
// Besides the reentrant lock there are a fenced and a spin lock, and the plain lock of
// other libraries (package rlock), a fair lock, which serves the waiters of all processes in the order in which they
// came (package fairlock), and a read-write lock (package rwlock). The contract of
// all of them is in package lock.
//
// Several locks can be taken as one: all of them, or a majority of independent servers
// (package multilock).
//
// Semaphores limit how much of something is in use at once (package semaphore), and a
// count-down latch has some wait for what others do (package countdown).
package redlatch
