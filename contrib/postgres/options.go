package pglock

import (
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Option configures NewAdvisory, NewTable or CreateTable. An option that the function does not have makes it fail with an
// error that matches lock.ErrInvalid.
type Option func(*config) error

type config struct {
	kind    kind
	ttl     time.Duration
	client  []driver.Option
	conns   int
	key     func(name string) int64
	table   pgx.Identifier
	poll    time.Duration
	listen  *pgxpool.Pool
	polling bool
}

type kind string

const (
	advisoryKind kind = "NewAdvisory"
	tableKind    kind = "NewTable"
)

const (
	defaultTTL   = 15 * time.Second
	minTTL       = time.Second
	maxTTL       = time.Hour
	defaultConns = 8
	defaultPoll  = 250 * time.Millisecond
	minPoll      = 10 * time.Millisecond
	maxPoll      = time.Minute
)

// TTL sets how long a hold lasts after the last request that the server has answered. The client makes a request in each
// third of it. Others get the lock of a client that has died or is cut off after one and a half of it and two seconds, at the
// latest. The default is 15 s; it must be from a second to an hour.
func TTL(d time.Duration) Option {
	return func(c *config) error {
		if d < minTTL || d > maxTTL {
			return invalid("TTL(%v): must be from %v to %v", d, minTTL, maxTTL)
		}
		c.ttl = d
		return nil
	}
}

// ClientOptions sets options of package driver: the logger and the providers of telemetry.
func ClientOptions(opts ...driver.Option) Option {
	return func(c *config) error {
		c.client = append(c.client, opts...)
		return nil
	}
}

// MaxConns bounds the connections of an Advisory, which are its own and not from the pool: one for all locks that are free when
// they are acquired, and another one for each lock that this client waits for, and then holds. If there are no more,
// waiters ask again each quarter of a second instead. The default is 8; it must be at least 1.
func MaxConns(n int) Option {
	return func(c *config) error {
		if n < 1 {
			return invalid("MaxConns(%d): must be at least 1", n)
		}
		c.conns = n
		return c.of(advisoryKind, "MaxConns")
	}
}

// Keys sets the function that returns the key of an advisory lock for a name, to share locks with programs that lock
// by hand. It must not block. The default is Key.
func Keys(f func(name string) int64) Option {
	return func(c *config) error {
		if f == nil {
			return invalid("Keys: the function is nil")
		}
		c.key = f
		return c.of(advisoryKind, "Keys")
	}
}

// Named sets the name of the table, and of its schema before that if it is not on the search path. The default is
// redlatch_locks.
func Named(table ...string) Option {
	return func(c *config) error {
		if len(table) < 1 || len(table) > 2 {
			return invalid("Named(%q): must be a table, or a schema and a table", table)
		}
		for _, part := range table {
			if err := checkText("Named: a name", part, maxIdentifier); err != nil {
				return err
			}
		}
		c.table = table
		return c.of(tableKind, "Named")
	}
}

// ListenOn sets a pool whose connections go directly to the server, without a pooler, for the one connection with which a
// Table listens for releases. It is not taken from the pool, whose configuration it uses. Without ListenOn a Table listens
// if its own pool has direct connections.
func ListenOn(pool *pgxpool.Pool) Option {
	return func(c *config) error {
		if pool == nil {
			return invalid("ListenOn: the pool is nil")
		}
		c.listen = pool
		return c.of(tableKind, "ListenOn")
	}
}

// Poll has a Table ask for a lock that it waits for at that interval, and not listen. The default without a connection to
// listen on is 250 ms; it must be from 10 ms to a minute. All clients of a table should have the same interval.
func Poll(interval time.Duration) Option {
	return func(c *config) error {
		if interval < minPoll || interval > maxPoll {
			return invalid("Poll(%v): must be from %v to %v", interval, minPoll, maxPoll)
		}
		c.poll = interval
		c.polling = true
		return c.of(tableKind, "Poll")
	}
}

// of returns an error unless the option belongs to that kind.
func (c *config) of(k kind, option string) error {
	if c.kind != k {
		return invalid("%s is an option of %s", option, k)
	}
	return nil
}

// resolve evaluates the options of a function.
func resolve(k kind, pool *pgxpool.Pool, opts []Option) (config, error) {
	c := config{
		kind: k, ttl: defaultTTL, conns: defaultConns, key: Key, table: pgx.Identifier{"redlatch_locks"}, poll: defaultPoll,
	}
	if pool == nil {
		return c, invalid("the pool is nil")
	}
	for _, opt := range opts {
		if opt == nil {
			return c, invalid("a nil option")
		}
		if err := opt(&c); err != nil {
			return c, err
		}
	}
	if c.polling && c.listen != nil {
		return c, invalid("Poll excludes ListenOn")
	}
	return c, nil
}

const (
	maxName       = 512 // far less than a page of an index has room for
	maxIdentifier = 63
)

// checkText returns an error unless s is a text that the server can store.
func checkText(what, s string, limit int) error {
	if s == "" || len(s) > limit {
		return invalid("%s has %d bytes: must have from 1 to %d", what, len(s), limit)
	}
	if !utf8.ValidString(s) {
		return invalid("%s is not UTF-8", what)
	}
	for i := range len(s) {
		if s[i] == 0 {
			return invalid("%s has a byte 0", what)
		}
	}
	return nil
}

// invalid returns an error that matches lock.ErrInvalid.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", lock.ErrInvalid, fmt.Sprintf(format, args...))
}
