// Package robustness checks histories: worker processes contend for locks while
// a nemesis stops, kills and cuts off everything in reach, and what they saw is
// compared with a model of what a lock promises. It has nothing to import.
//
// # Running it
//
//	go test -short ./robustness/              20 seconds on one server
//	make robustness                           a minute on each server
//	make robustness FOR=5m SEED=42            as long as it takes
//	make robustness FOR=1s SEED=57            one round again
//	make soak                                 an hour on each server
//
// A run is made of rounds of some seconds. Each has new lock names, new
// processes, and a seed of its own, one more than that of the round before. The
// seed decides which faults come when and what each goroutine does next; how
// that falls together is up to the machine, so a failure may take a few rounds
// of its seed to come back. Each minute of a longer run has a new server, and says
// with what seed it began.
//
// # What is checked
//
// Of every round: the history of each lock, by the model below; that no call of
// Lock outlasts its Wait by much; that a lease which has run out ends the
// hold's context; that calls return only errors they may return; and that
// every lock can be taken at the end. Of every minute: that no key is left that does
// not expire, and that what makes a run worth it has come up, which is holds of every
// kind, faults, and what they bring about.
//
// # Reading a failure
//
// The failure names the seed, the lock and the directory with the journals of
// all processes (a line of JSON for each event, times from CLOCK_MONOTONIC in
// nanoseconds) and, for each lock whose history does not fit the model, an HTML
// page by porcupine. The page shows operations as bars from call to return; the
// longest order that fits is drawn through them, and the first operation it
// cannot contain is marked. REDLATCH_ROBUSTNESS_DIR chooses where the
// directories are made. A verdict "Unknown" means that the checker ran out of
// time; it is a failure too, and asks for shorter rounds.
//
// # The model
//
// Fair locks take part, and the write lock of a read-write lock, as exclusive
// locks like the others. Their order, and readers, are not in the model.
//
// The state of a lock is who holds it, by which acquisitions (several if a named
// owner has re-entered), and the last fencing token. An operation takes effect
// at one moment between its call and its return:
//
//	acquire  legal if nobody else holds; of a fenced lock only with a token
//	         greater than the last
//	end      ends the hold of one acquisition, if it is there; always legal
//	wipe     ends all holds, and forgets the token if the counter went too
//	gone     what a LostError with ReasonGone says; legal if the acquisition
//	         has no hold any more
//
// A hold ends in the history at the earliest moment at which it may: when Unlock
// was called, or at the last local deadline that was seen (now + Remaining) if
// that came first. That is where the promise of exclusion ends, whatever the
// server thinks. Nothing becomes illegal by an earlier end, so there is no need
// to try later ones, and end is an operation without duration; so is gone, at
// the time of the loss. The same holds for a process that was killed: its holds
// end at their last deadline in its journal, or at the call of Unlock.
// Only if the loss is reported as gone does Unlock not end the hold: then a
// deadline that has passed, or a wipe, must explain it.
//
// What has no place in the model, because it makes nothing legal that is not
// legal without it: acquisitions that failed, and those whose outcome is
// unknown (ErrIndeterminate, a process killed in the call, a context cancelled
// meanwhile). At worst they kept the lock from others for a while. That they do
// not keep it for ever is checked at the end of the round.
//
// Two kinds of acquisition take the lock but are promised nothing afterwards:
// one whose lease was over before it could be looked at, and one of a named
// owner that existed already when the lock was wiped. The server counts the
// holds of an owner and cannot tell one that was wiped from its successor, so
// the Unlock of the former may end the latter.
//
// For the same reason a worker uses an owner from one goroutine only. With
// several, an Unlock that is under way while its lease ends may end what another
// goroutine has taken as that owner in that moment.
package robustness
