// Package pglock makes locks of package lock with PostgreSQL, through the library pgx. There are two kinds of clients:
//
//	                  NewAdvisory                               NewTable
//	what a lock is    an advisory lock of a session             a row of a table, with a lease
//	connections       its own, directly to the server           of a pool, also through a pooler that pools transactions
//	what is written   nothing                                   two statements that commit for each pair of Lock and Unlock
//	fencing tokens    no                                        yes, and Check
//	the holder dies   others have the lock at once              others have the lock when the lease is over
//	the network dies  see below                                 others have the lock when the lease is over
//	read-write lock   yes                                       no: a statement sees one row for certain, and its readers
//	                                                            would have to be in it, each with a lease
//	semaphore         no: the server has no counted locks, and  no, for the same reason
//	                  trying each permit's lock is no queue
//	lock.Lease        the client ends it                        the server ends it, too
//	order             of the server's queue                     of the row's queue
//	stays behind      nothing                                   the row, until Prune
//
// A client is for one process, and is shared by all of its goroutines. All objects of package driver are used in the
// same way:
//
//	locks, err := pglock.NewAdvisory(ctx, pool)
//	...
//	defer locks.Close()
//	err = locks.Lock("invoice:7").Do(ctx, func(ctx context.Context) error {
//		return send(ctx, 7)
//	})
//
// Locks belong to a database, not to the server: clients that are to exclude each other connect to the same one. Both
// clients refuse a standby; the error matches lock.ErrUnavailable.
//
// # Advisory locks
//
// A request first tries whether the lock is free, on a session that all requests of the client share. If it is not, the
// request gets a session without locks, up to MaxConns of them, waits there in the queue of the server, and has its lock
// there. So the server wakes whoever is next, also after the end of a holder that died or that is another
// program. There is no message that can be lost, and nothing to ask for again. Of the waiters of one client for one lock
// only the first waits on the server, and the others wait for it in their order.
//
// Readers share the session that has the lock, where the server lets them pass writers of other clients. So ten times a second
// one of them asks on another session, behind these writers, and the next readers wait for its answer. A reader passes if
// MaxConns leaves no session for that, or with TryLock.
//
// The key is a hash of the name of 64 bits (see Key). To share a lock with a program that calls pg_advisory_lock by hand,
// use Keys. Who holds a lock is in pg_locks:
//
//	SELECT a.pid, a.client_addr, a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
//	WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
//	  AND l.classid = ($1 >> 32 & 4294967295)::oid AND l.objid = ($1 & 4294967295)::oid
//
// # When an advisory lock is lost
//
// The server releases the locks of a session when that ends. If the server ends it (pg_terminate_backend, a restart), or
// the connection breaks, the client hears of it with the end of the connection, and the holds end at once, with
// lock.ReasonGone. If the server is silent, the holds end by the clock of the client, TTL after it sent the last request
// that was answered, with lock.ReasonExpired.
//
// The client has the server end a session whose client is silent, by tcp_user_timeout and tcp_keepalives_idle, a quarter of
// TTL after that. So a client that the network cuts off has ended its holds before others can have the locks, if three
// conditions are met:
//
//   - The server runs on Linux and the connection is TCP from end to end. A proxy in between has timeouts of its own:
//     the server hears of its end, and not of the client's.
//   - Nothing else ends the session while the client is cut off: no pg_terminate_backend, no restart of the server, no
//     failover. These release the lock at once, and the client hears of it when its TTL is over. After a failover both
//     servers may grant the same lock for that long.
//   - The process is not paused between a look at the context of its hold and the work.
//
// A process that is stopped (SIGSTOP) while its host goes on keeps its locks at the server: TCP is alive. When it goes on after
// TTL, its holds are lost.
//
// Advisory locks have no fencing tokens with which a resource could tell an old holder. Where work must stay correct in
// these cases, use a Table.
//
// Sessions need a direct connection. A pooler that pools transactions runs each statement in another session, so that locks
// would be taken and lost at random. NewAdvisory recognizes any pooler by the id of the backend, and fails with an error that
// matches lock.ErrUnsupported. It also fails if the server only pretends to lock, as some do that speak PostgreSQL's protocol.
//
// # Locks in a table
//
// CreateTable creates the table, or a migration does:
//
//	CREATE TABLE redlatch_locks (
//		name  text COLLATE "C" PRIMARY KEY,
//		token bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
//		owner text,
//		until timestamptz NOT NULL,
//		queue text[] NOT NULL DEFAULT '{}'
//	) WITH (fillfactor = 50);
//
// The user of the pool needs the rights to select, insert and update, and to delete for Prune.
//
// A row is locked by an owner until a time of the server's clock. One statement for each third of TTL renews all holds of a
// client, which end by its own clock if no renewal succeeds: TTL counts from when the statement was sent. The clock of the
// server must not jump ahead by more than a quarter of TTL, and the pool needs a free connection for the statement: a program
// that may use all of them, for example in transactions that wait for a lock, gives the Table a pool of its own.
//
// Waiters are in a queue in the row, one for each client; further waiters of a client wait for that one. A release
// tells the first in the queue by NOTIFY, which clients hear on one more connection. That has to be a direct one: if the pool is
// behind a pooler, ListenOn names another pool. Without one, waiters ask at an interval (see Poll). A
// client that dies in the queue keeps the others waiting once, for 6 s at most, or about three intervals if they ask.
//
// A request for a lock has a deadline by the clock of the server, which is when its client gives it up: after 2 s, or when its
// context is over. If the network, a pooler or a transaction delays it for longer, the server ignores it, and what it has done
// before is removed. So no row is locked for nobody, unless the clock jumps back while a request is delayed.
//
// Every statement is a transaction of its own, correct at isolation level READ COMMITTED, which is the default: it locks the
// row, and then evaluates its conditions for what it has locked. At the stricter levels it may fail: a call that waits repeats
// it, and the error of others matches lock.ErrUnavailable.
// Commits have to be durable: synchronous_commit must not be off, and after a failover to a standby that does not replicate
// synchronously the lock may be forgotten. A token that was issued before may then be issued again.
//
// # Fencing tokens
//
// Each acquisition has a token that is larger than the tokens of all earlier ones, also after Prune. Where the data is in the
// same database, Check ties a transaction to the hold: it fails if another client has had the lock since, and nobody
// acquires the lock before the transaction ends. No pause of the process, and no delay in the network, lets work of two holders
// mix:
//
//	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		if err := locks.Check(ctx, tx, hold); err != nil {
//			return err
//		}
//		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - 10 WHERE id = 7")
//		return err
//	})
//
// With database/sql, the same statement is, for lock.OwnerOf(hold).String() and hold.Token(), which must find a row:
//
//	SELECT FROM redlatch_locks WHERE name = $1 AND owner = $2 AND token = $3 FOR KEY SHARE
//
// Data elsewhere keeps the largest token that it has seen, and refuses smaller ones:
//
//	UPDATE documents SET body = $1, token = $2 WHERE id = $3 AND token <= $2
package pglock
