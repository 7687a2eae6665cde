// Package multilock combines several locks into one: Multi holds all of its members,
// Red a majority of them.
//
// # Multi
//
// A Multi protects work that needs several things at once, such as two accounts, or an
// order and its stock. It holds all of its members or none. Members may be locks of any
// kind of this module, on any servers, Redlocks, and locks of package driver on other stores, such as
// a row lock of PostgreSQL beside a lock on Redis.
//
// Callers that name the same locks in different orders do not deadlock: every Multi
// acquires its members in one order, by server, hash tag and name. Two clients can disagree about the
// order of servers after one was restarted. A Multi on several servers that has waited long
// for a member therefore releases the others and starts over, each time with twice the
// patience. On one server it keeps waiting. A caller that holds one of these locks should not wait for another without a
// bound: use a Multi of both.
//
// Reentrant locks (rlock.Lock) on one server, and in a cluster in one slot, are acquired
// and released by one script. Give such names a common hash tag: "{order-7}:stock" and
// "{order-7}:invoice".
//
// # Red
//
// A Red is one lock on several independent servers, held by the caller that holds a
// majority of them: the Redlock algorithm (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
// It survives the loss of a minority of the servers without a failover. Built from plain
// locks (Client.PlainLock) it is compatible with other implementations, such as redsync.
//
// Its value has been debated since 2016. Martin Kleppmann ("How to do distributed
// locking") argued that no lock with a lease guarantees exclusion, because a process can
// pause after it has checked the time. Only a fencing token does, a number that grows with
// each acquisition and that the resource compares, and Redlock has none: counters on several
// servers are not one. Redlock also needs steady clocks and servers that keep their data.
// Salvatore Sanfilippo ("Is Redlock safe?") replied that such pauses harm every lock with a
// lease, and that a resource that compares tokens might not need the lock. Both are right:
//
//   - For efficiency, to avoid doing work twice, use one server and rlock.Lock.
//   - For availability without failover, use Red. A replicated server can forget a lock
//     when it fails over.
//   - For correctness use rlock.Fenced and let the resource check the token. If it cannot,
//     no lock with a lease is sufficient, not even with a consensus system (etcd, ZooKeeper).
//
// A server that has lost its data must not vote for longer than the longest lease. Otherwise
// two callers can each hold a majority. Either operators keep it offline for that time, or
// all callers use the option RestartDelay.
package multilock
