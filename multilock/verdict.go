package multilock

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// summary is what the servers have answered in a round without a majority.
type summary struct {
	taken, restarted, down int
	final, refused, away   []error // away includes the others
}

// summary counts the answers. A server without one counts only in an undecided round.
func (rd *round) summary(decided bool) (a summary) {
	rd.mu.Lock()
	defer rd.mu.Unlock()

	for i, v := range rd.votes {
		err := v.err
		if v.asking && !decided {
			err = errNoAnswer
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, errRestarted):
			a.restarted++
			continue
		case isTaken(err):
			a.taken++
			continue
		case isFinal(err):
			a.final = append(a.final, serverError{i, err})
		case errors.Is(err, lock.ErrUnavailable):
			a.down++
		case wire.KindOf(err) == nil:
			a.refused = append(a.refused, serverError{i, err})
		}
		a.away = append(a.away, serverError{i, err})
	}

	a.refused = append(a.refused, a.final...)
	return a
}

// line returns the answers of n servers, of which yes had granted their members, for a message.
func (a summary) line(yes, n int) string {
	var counts []string
	for _, c := range []struct {
		servers int
		what    string
	}{
		{a.taken, "held by others"}, {a.restarted, "up for too short a time"}, {a.down, "not reached"},
		{len(a.away) - a.down - len(a.refused), "silent"}, {len(a.refused), "refused"},
		{n - yes - a.taken - a.restarted - len(a.away), "not awaited"},
	} {
		if c.servers > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", c.servers, c.what))
		}
	}
	line := fmt.Sprintf("%d of %d servers", n-yes, n)
	if len(counts) > 0 {
		line += ": " + strings.Join(counts, ", ")
	}
	if len(a.away) > 0 {
		line += " (" + strings.ReplaceAll(errors.Join(a.away...).Error(), "\n", "; ") + ")"
	}
	return line
}

// verdict returns an error if the answers of the members make another round pointless, and
// otherwise the answers for the error of a wait that ends now. yes is the number of members
// that the round had acquired.
func (rd *round) verdict(yes int, decided bool) (answers, err error) {
	a := rd.summary(decided)
	n := len(rd.votes)
	quorum := rd.r.quorum
	if n-len(a.final) < quorum {
		return nil, errors.Join(a.final...)
	}

	answers = errors.New(a.line(yes, n))
	if n-len(a.away) >= quorum {
		return answers, nil
	}
	if n-a.taken-a.restarted-a.down-len(a.refused) >= quorum { // the round may have acquired a majority
		answers = errors.Join(lock.ErrIndeterminate, answers)
	} else if n-len(a.refused) < quorum {
		answers = refusal{answers, a.refused}
	} else {
		answers = errors.Join(lock.ErrUnavailable, answers)
	}

	return answers, &engine.Unavailable{Err: errNoMajority}
}

// refusal is an error with the refusals of servers, which its text has already.
type refusal struct {
	error
	servers []error
}

func (r refusal) Unwrap() []error { return r.servers }

var errNoAnswer = errors.New("no answer in time")

// errNoMajority is for a round in which too few servers have answered. The answers say more.
var errNoMajority = errors.New("too few servers have answered")

// serverError is the error of server i.
type serverError struct {
	i   int
	err error
}

func (e serverError) Error() string { return fmt.Sprintf("server %d: %s", e.i+1, wire.Reason(e.err)) }

func (e serverError) Unwrap() error { return e.err }

// isTaken reports whether err is the answer that another owner holds the member.
func isTaken(err error) bool {
	return errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, errNoAnswer) &&
		!errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lock.ErrIndeterminate)
}

// isFinal reports whether the next attempt would fail with the same error.
func isFinal(err error) bool {
	return errors.Is(err, lock.ErrInvalid) || errors.Is(err, lock.ErrReentered) || errors.Is(err, lock.ErrUpgrade) ||
		errors.Is(err, lock.ErrUnsupported) || errors.Is(err, lock.ErrClosed) || wire.IsRefused(err)
}
