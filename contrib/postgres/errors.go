package pglock

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"

	"github.com/redlatch/redlatch/lock"
)

// Codes of SQLSTATE.
const (
	codeCanceled     = "57014" // also by statement_timeout
	codeLockTimeout  = "55P03"
	codeReadOnly     = "25006" // a standby
	codeNoTable      = "42P01"
	codeTableExists  = "42P07"
	codeTypeExists   = "42710" // the type of the rows of a table
	codeUniqueness   = "23505" // also in the catalog of tables
	classConnection  = "08"
	classRollback    = "40" // deadlocks and serialization
	classOfOperators = "57P"
)

// storeError is an error of the server or of its library. It hides the errors of contexts, which are not the caller's.
type storeError struct{ err error }

func (e storeError) Error() string {
	return strings.NewReplacer("\n", "; ", "redlatch: ", "").Replace(e.err.Error()) // the latter begins the text already
}

// Unwrap returns what the server has said, or nil.
func (e storeError) Unwrap() error {
	if pg := serverError(e.err); pg != nil {
		return pg
	}
	return nil
}

// serverError returns what the server has said, or nil.
func serverError(err error) *pgconn.PgError {
	var pg *pgconn.PgError
	errors.As(err, &pg)
	return pg
}

// unavailable returns the error for a request that has changed nothing.
func unavailable(err error) error { return fmt.Errorf("%w: %w", lock.ErrUnavailable, storeError{err}) }

// unknown returns the error for a request whose outcome is unknown.
func unknown(err error) error { return fmt.Errorf("%w: %w", lock.ErrIndeterminate, storeError{err}) }

// notSent returns the error for a request for which there was no connection. Whatever the server says then, another
// attempt may have another answer.
func notSent(err error) error {
	if errors.Is(err, puddle.ErrClosedPool) {
		return fmt.Errorf("%w: %w", lock.ErrClosed, storeError{err})
	}
	return unavailable(err)
}

// failed returns the error for a statement, which is a transaction of its own.
func failed(err error) error {
	pg := serverError(err)
	if pg == nil && pgconn.SafeToRetry(err) {
		return unavailable(err)
	}
	// After FATAL the statement may have been committed.
	if pg == nil || ends(pg) {
		return unknown(err)
	}

	for _, temporary := range []string{
		classConnection, classRollback, classOfOperators, codeCanceled, codeLockTimeout, codeReadOnly,
	} {
		if strings.HasPrefix(pg.Code, temporary) {
			return unavailable(err)
		}
	}
	return storeError{err}
}

// refused returns the error of a constructor, whose requests change nothing.
func refused(err error) error {
	if errors.Is(err, lock.ErrUnsupported) || errors.Is(err, lock.ErrUnavailable) {
		return err
	}
	if pg := serverError(err); pg != nil && !ends(pg) {
		return failed(err)
	}
	return unavailable(err)
}

// ends reports whether the server ends the session with that error.
func ends(pg *pgconn.PgError) bool {
	severity := pg.SeverityUnlocalized
	if severity == "" {
		severity = pg.Severity
	}
	return severity == "FATAL" || severity == "PANIC"
}

// temporary reports whether another attempt may succeed after that error.
func temporary(err error) bool {
	return errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
}

// configured returns the error of a constructor.
func configured(ctx context.Context, store string, err error) error {
	if ctx.Err() != nil && temporary(err) {
		err = fmt.Errorf("%w: %w", err, context.Cause(ctx))
	}
	return &lock.Error{Op: "connect", Kind: "client", Name: store, Err: err}
}
