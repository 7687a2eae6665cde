// Package robustness checks histories. Worker processes contend for objects of every kind
// while a nemesis stops, kills and disconnects them and their servers, and the events they
// record are compared with models of a lock, of a latch, and of work that runs once per slot.
// The package exports nothing.
//
// # Running it
//
//	go test -short ./robustness/              a minute on each server
//	make robustness                           a minute of each history on each server
//	make robustness FOR=5m SEED=42            any duration
//	make robustness FOR=1s SEED=57            repeats one round
//	make soak                                 an hour on each server
//
// A run consists of rounds of some seconds. Each round has new lock names, new processes,
// and its own seed, one more than that of the previous round. The seed determines the faults,
// their times, and the actions of each goroutine. Scheduling is up to the machine, so a
// failure may take several rounds with its seed to recur. Each minute of a longer run uses a
// new server and logs its first seed.
//
// # What is checked
//
// Every round checks that
//
//   - the history of each lock, semaphore and latch fits its model below;
//   - no waiter of a fair lock and no candidate of an election is overtaken by one that came when it
//     was in the queue already, nor a request for permits that has waited for a while;
//   - no waiter waits for long for a lock that nobody has;
//   - a hold begins with the lease that it has asked for, and an owner that certainly holds a lock
//     can lock it again;
//   - a detached hold is found by Adopt, and what it does not find soon becomes free;
//   - the context of a hold ends with its lease: half of the contexts end less than a millisecond after
//     a timer;
//   - no call of Lock exceeds its Wait by much;
//   - an expired lease ends the hold's context, and Unlock then reports the loss, as it does
//     if the lock was deleted during the hold;
//   - calls return only expected errors, and a request for more permits than there are fails
//     at once;
//   - at the end every lock can be acquired, a semaphore has neither lost nor gained a permit,
//     and a latch ends when the rest is counted down.
//
// TestSlots has rounds of its own: 8 processes run the work of each slot when it is due by their
// clocks, which differ by up to 2 seconds. The work of a slot is a hold on a lock in the model.
// Besides, these rounds check that
//
//   - no work begins after the success of its slot, unless the server has lost its data, or the
//     work that succeeded had lost its lock when the other had asked already;
//   - Run reports that the work is done only if it has succeeded before;
//   - at the end the work of each slot can run, or is done.
//
// TestRates has rounds of its own, too: goroutines of each worker acquire permits of a rate limiter. In no
// window of the server's clock they get more permits than the rate, unless the server has lost its
// data, and at the end the whole rate can be acquired.
//
// Every minute checks that no key without an expiry is left, and that the run contained
// holds of every kind, faults, and their consequences.
//
// TestBrokenScriptsAreDetected replaces a script by a wrong one, and requires that a round
// detects it. A new promise of a script deserves another row there.
//
// # The rounds
//
// Goroutines of each worker use objects of one kind each. Their leases are renewed, end with MaxHold, or
// are fixed: shorter than many pauses of the machine, or longer than the watchdog timeout. Some goroutines
// of a worker act as one owner, which locks a MultiLock whose members it holds, and its members. Others
// detach holds and adopt them. A worker is near the server, or its link has a round trip of 0.5, 2, 30 or
// 100 ms.
//
// Half of the rounds have only a few kinds, with many operations, and half of those have no faults. The
// checks of order and of waits pass over times at which a fault, or another program on the machine, delays
// requests.
//
// # The faults
//
// Each worker has a connection of its own to the server, through a link. The nemesis stops
// and kills workers; cuts or stalls links, delays their data, and loses replies; kills
// connections on the server, pauses the server, flushes its scripts, deletes a lock or
// everything, restarts the server without its data, and publishes messages that announce
// releases. A stall lasts longer than a lease every other time, and at times longer than
// Unlock waits. A silent link loses all data for longer than that.
//
// # Reading a failure
//
// A failure names the seed, the lock and the directory with the journals of all processes
// (a line of JSON for each event, with times from CLOCK_MONOTONIC in nanoseconds). For
// each lock whose history does not fit the model, that directory contains an HTML page by
// porcupine. It shows operations as bars from call to return, the longest legal order as a
// line through them, and marks the first operation that does not fit.
// REDLATCH_ROBUSTNESS_DIR sets the parent of these directories. The verdict "Unknown" means
// that the checker ran out of time. This is also a failure; use shorter rounds.
//
// # The model
//
// All locks, elections and semaphores have the same model: an exclusive lock, where a reader or a permit
// is a hold that others may share, and of permits there is a limit. A multi-lock is a hold on
// each of its members. Queues are left out, because no order follows from the moments of calls
// and returns; the order of the fair lock has a check of its own (order_test.go).
//
// The state is the holds, each with its owner (several after re-entry by a named owner), and
// the last fencing token. An operation takes effect at one moment between its call and its
// return:
//
//	acquire  legal if all holds are the owner's, or may be shared like this one and are
//	         fewer than the limit; for a fenced lock only with a token greater than the
//	         last, which re-entry shares
//	end      ends the hold of one acquisition, if it exists; always legal
//	wipe     ends all holds, and resets the token if the counter was deleted
//	gone     a LostError with ReasonGone; legal if a wipe or the end of the lease
//	         explains it
//
// A hold ends in the history at the earliest possible moment: the call of Unlock, or the
// last known local deadline (now + Remaining) if that came first. The promise of
// exclusion ends there, whatever the server assumes. An earlier end makes nothing illegal,
// so later ones need not be tried, and end is an operation without duration. So is gone, at
// the time of the loss. The holds of a killed process likewise end at their last deadline in
// its journal or at the call of Unlock. A multi-lock that has lost a member keeps the others
// for as long.
//
// The model omits operations that cannot make others legal: failed acquisitions, and those
// with an unknown outcome (ErrIndeterminate, a process killed during the call, a context
// cancelled meanwhile). At worst they block others for a while. The end of the round
// checks that they do not block others for ever.
//
// An acquisition whose lease expired before it could be observed holds the lock without any
// promise, and so does one that ends right after a wipe: within a process a claim is passed on
// without a question for some milliseconds. Re-entry after a wipe is omitted: the owner does
// not know yet that the server has lost what its holds share. So are the permits without a
// lease after a wipe: earlier holders still release theirs.
//
// The state of a latch is its count. CountDown takes effect once, and returns what is left;
// after ErrIndeterminate, or in a killed process, at any time later or never; after another
// error never. During a wipe of everything it may also have taken effect before, because the
// server forgets the reply. Wait returns nil only at zero.
package robustness
