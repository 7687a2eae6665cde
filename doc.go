// Package redlatch provides distributed synchronizers on Redis and Valkey. It uses
// Redisson's wire format: Go and Java services on one server contend for the same
// locks.
//
// # What is not guaranteed
//
// A lock is a lease, and a lease is not a proof of exclusion:
//
//   - A process can be paused (by a garbage collector, a debugger, a busy host) between
//     checking its lease and acting on it. When it continues, the lease may be over and
//     another client may hold the lock. A suspended machine also stops its monotonic
//     clock, and then even a check does not help.
//   - Replication is asynchronous. After a failover the new primary may lack a lock that
//     the old one acknowledged.
//   - Leases assume that clocks run at about the same rate: a hold ends before its lease
//     does, by a thousandth of the lease and a millisecond. A server whose clock is faster
//     than that, or is set forward, ends leases early.
//
// Work that merely should not be done twice can tolerate that. Work that must stay
// correct needs a fencing token that the resource itself checks: see Client.FencedLock
// and rlock.Guard.
//
// # What is guaranteed
//
//   - While the lease runs by the hold's own monotonic clock, no other client holds the
//     lock, as long as the single primary keeps its data and the lock is not forced open.
//     When the lease is lost, the hold's context ends with a *lock.LostError.
//   - A failed or cancelled acquisition leaves no key, no subscription and no renewal. If
//     the server is unreachable for the cleanup, the key expires with its lease.
//   - No wait depends on a message. An expiry or a poll bounds each wait, so lost messages
//     only delay a waiter.
//
// # Use
//
// One Client serves a process. Objects are cheap, immutable values of a name, created
// where they are used:
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
// Package rlock has the reentrant lock, the fenced lock, the spin lock, and the plain
// lock of other libraries. Package fairlock has the fair lock, which serves the waiters
// of all processes in order of arrival. Package rwlock has the read-write lock. Package
// lock defines the contract of all locks.
//
// Package multilock combines several locks: all of them, or a majority of independent
// servers. Package grouplock locks several values at once. Package semaphore limits
// concurrent use of a resource, and the latch of package countdown lets callers wait for
// work done by others. Package ratelimit limits how often something happens. Package
// election elects a leader, with a fencing token for each term. Package once runs work once
// although several machines start it, such as a cron job.
//
// # The driver
//
// New, Wrap and ParseURL have types of rueidis, version 1. A program that only calls Open sees none of them. If
// rueidis publishes another major version, its types differ, and redlatch follows with a major version of its
// own. Minor versions of redlatch may raise the minor version of rueidis that go.mod requires.
package redlatch
