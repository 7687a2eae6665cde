// Package ratelimit limits how often something happens across processes and machines: it is Redisson's
// RRateLimiter. Java services on the same server share the same rate.
//
// A client creates the objects. The first request creates the limiter on the server, with the rate in
// [Rate]:
//
//	mails := client.RateLimiter("mails", ratelimit.Rate(100, time.Minute))
//	err := mails.Do(ctx, send) // waits for a permit
//
// Without that option a limiter does not exist until its rate is set, and every request fails with
// [ErrNotFound].
//
// # The rate
//
// A limiter is a sliding window. An acquisition at a time t of the server's clock counts until t plus the
// interval, so no interval that ends at an acquisition has more permits than the rate. The first
// permits after a pause may all be acquired at once. Times are whole milliseconds. The window covers
// acquisitions; what their callers do follows a round trip later, and much later if a process is stopped in
// between.
//
// The rate is exceeded by what the server forgets: a server that loses its data, or a failover to a replica
// that does not have the last acquisitions, begins a new window. The server's clock may be set back or forth: permits then
// come back at most an interval late, or as much too early.
//
// # Order
//
// Waiters of one process are served first come, first served. They share their requests: only the first sends
// one, for up to 100 of them, and it sleeps until the server says that its permits are due. Of several processes, the one
// whose request has waited longest has the turn, and no other redlatch client is served before it. So requests for many
// permits do not starve. A process with the turn may serve some of its later requests too, until the others
// come when its turn is over.
//
// So if nobody gives up, a request waits until the window has had room for the permits of older
// requests, and for up to an interval more for each other process. A process that dies while it has the turn adds half a second, or
// 6 s if its permits were not due so soon.
//
// A waiter that gives up takes no permits. Waiters of other processes learn that from a message, and so do they if
// the rate is set or permits are released. If the message is lost, or Redisson does that, they look after 5 s at the
// latest.
//
// Java clients do not know this order, and may be served earlier. If they use the whole rate, a
// request for many permits may wait for long.
//
// # Retries
//
// An acquisition has an id, under which the server knows it again. If its reply is lost, it is repeated, and the permits
// count from the repetition. An acquisition whose outcome remains unknown is undone in the background; what cannot be undone
// counts for an interval.
package ratelimit

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// kind is the name of the kind in logs and telemetry.
const kind = "rate-limiter"

// MaxRate is the highest rate that a limiter can be given. Java accepts higher ones.
const MaxRate = math.MaxInt32

// ErrNotFound means that the limiter does not exist on the server, and that the object was made without
// [Rate]. It matches no error of package lock.
var ErrNotFound = errors.New("redlatch: rate limiter not found")

// errMissing is the cause of an error that matches ErrNotFound.
var errMissing = fmt.Errorf("%w; ratelimit.Rate or TrySetRate creates it", ErrNotFound)

// Config is the configuration of a limiter on the server.
type Config struct {
	// Rate is the number of permits for each interval, from 1 to MaxRate.
	Rate int
	// Per is the interval, from a millisecond to lock.MaxLease. The server rounds it up to milliseconds. Redisson calls it
	// rateInterval.
	Per time.Duration
	// PerClient gives each client the whole rate for itself, instead of all clients together. Redisson calls it
	// RateType.PER_CLIENT.
	PerClient bool
	// KeepAlive is how long after its last use the server deletes the limiter; 0 means never. It must not be
	// less than Per. Redisson calls it keepAliveTime, and 3.23 ignores it.
	KeepAlive time.Duration
}

// check returns an error if a limiter cannot have the configuration.
func (c Config) check() error {
	if c.Rate < 1 || c.Rate > MaxRate {
		return fmt.Errorf("a rate of %d: must be from 1 to %d", c.Rate, MaxRate)
	}
	if c.Per < time.Millisecond || c.Per > lock.MaxLease {
		return fmt.Errorf("a rate per %v: must be from a millisecond to %v", c.Per, lock.MaxLease)
	}
	if c.KeepAlive != 0 && (c.KeepAlive < c.Per || c.KeepAlive > lock.MaxLease) {
		return fmt.Errorf("a KeepAlive of %v: must be 0, or from the interval to %v", c.KeepAlive, lock.MaxLease)
	}
	return nil
}

// invalid joins an error with lock.ErrInvalid.
func invalid(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", lock.ErrInvalid, err)
}

// args returns the configuration as arguments of the scripts.
func (c Config) args() []string {
	if c.Rate == 0 {
		return []string{"", "", "", ""}
	}
	return []string{strconv.Itoa(c.Rate), wire.Millis(c.Per), wire.Flag(c.PerClient), wire.Millis(c.KeepAlive)}
}

// Option configures a limiter object. nil is invalid.
type Option func(*settings) error

type settings struct {
	config    Config
	keepAlive *time.Duration
}

// Rate is the option to create the limiter with a rate of n permits for each interval per, if it does not
// exist when permits are acquired. This takes no round trip of its own. So the limiter comes back after the server
// has lost it. An existing limiter keeps its rate: see SetRate. The limiter expires when it has not been used for a day,
// or for per if that is longer: see [KeepAlive]. n is from 1 to MaxRate, and per from a millisecond to lock.MaxLease.
func Rate(n int, per time.Duration) Option {
	return func(s *settings) error {
		if err := (Config{Rate: n, Per: per}).check(); err != nil {
			return fmt.Errorf("ratelimit.Rate: %w", err)
		}
		s.config.Rate = n
		s.config.Per = per
		return nil
	}
}

// PerClient is the option for [Rate] to give each client the whole rate for itself.
func PerClient() Option {
	return func(s *settings) error {
		s.config.PerClient = true
		return nil
	}
}

// KeepAlive is the option for [Rate] to have the server delete the limiter when it has not been used for d. Only
// acquisitions are uses, be they successful or not. With a d of 0 the limiter has no expiry, like one
// of Redisson; then redlatch's next use does not have to create it again, but the keys of each name stay for good. d must not be less
// than the interval.
func KeepAlive(d time.Duration) Option {
	return func(s *settings) error {
		s.keepAlive = &d
		return nil
	}
}

// defaultKeepAlive is the KeepAlive of a limiter that is created because of the option Rate.
const defaultKeepAlive = 24 * time.Hour

// resolve evaluates the options.
func resolve(opts []Option) (Config, error) {
	var s settings
	if err := session.Configure(&s, opts); err != nil {
		return Config{}, err
	}

	if s.config.Rate == 0 {
		if len(opts) > 0 {
			return Config{}, fmt.Errorf("%w: ratelimit.PerClient and ratelimit.KeepAlive need ratelimit.Rate", lock.ErrInvalid)
		}
		return Config{}, nil
	}
	s.config.KeepAlive = max(defaultKeepAlive, s.config.Per)
	if s.keepAlive != nil {
		s.config.KeepAlive = *s.keepAlive
	}

	return s.config, invalid(s.config.check())
}

// Limiter is a rate limiter. Client.RateLimiter returns one. It is immutable and safe for concurrent use: all
// state is on the server. All its methods return an error that matches lock.ErrInvalid for an invalid
// name or argument, and lock.ErrClosed after the client is closed.
type Limiter struct {
	s       *session.Session
	all     *Shared
	id      telemetry.Lock
	key     string
	err     error // invalid name or option
	config  Config
	queue   engine.Key
	channel string
	keys    []string // of the scripts that have limiter.lua
}

// New returns the limiter of that name. Client.RateLimiter calls it.
func New(all *Shared, name string, opts ...Option) *Limiter {
	s := all.e.Session
	l := &Limiter{s: s, all: all, id: telemetry.Lock{Kind: kind, Name: name}}
	l.key, l.err = s.Key(name, s.CheckName)
	config, err := resolve(opts)
	l.config = config
	l.err = cmp.Or(l.err, err)
	l.queue = engine.Key{Kind: kind, Name: l.key}
	l.channel = wire.RateChannel(l.key)
	l.keys = []string{
		l.key, wire.RateValue(l.key), wire.RateValueOf(l.key, s.ID), wire.RatePermits(l.key), wire.RatePermitsOf(l.key, s.ID),
		wire.RateTurn(l.key),
	}
	return l
}

// Name returns the name that the client was given.
func (l *Limiter) Name() string { return l.id.Name }

// object returns what errors name.
func (l *Limiter) object() wire.Object { return wire.Object(l.id) }

// check returns an error if no operation can succeed.
func (l *Limiter) check(ctx context.Context) error {
	return cmp.Or(l.err, l.s.Check(ctx))
}

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	acquireScript    = wire.LoadScript(luaFiles, "limiter", "acquire").AtRest()
	undoScript       = wire.LoadScript(luaFiles, "limiter", "undo").AtRest()
	releaseScript    = wire.LoadScript(luaFiles, "limiter", "release").AtRest()
	setRateScript    = wire.LoadScript(luaFiles, "limiter", "set_rate").AtRest()
	trySetRateScript = wire.LoadScript(luaFiles, "try_set_rate")
	deleteScript     = wire.LoadScript(luaFiles, "delete").AtRest()
	availableScript  = wire.LoadScript(luaFiles, "limiter", "available").AtRest()
	leaveScript      = wire.LoadScript(luaFiles, "leave")
)

const (
	// patience is how long a request is repeated while its caller waits.
	patience = 5 * time.Second
	// undoTime is how long the undo of an acquisition is repeated.
	undoTime = 5 * time.Minute
	// replyTTL is how long the server keeps the reply to a release.
	replyTTL = 30 * time.Second
)

// TrySetRate gives the limiter a configuration unless it has one, and reports whether it did. If a reply is lost,
// it also reports true if the limiter has that very configuration. TrySetRate blocks for one
// round trip, or for up to 5 s if the server does not answer; the error then matches lock.ErrIndeterminate, or
// lock.ErrUnavailable if nothing could be sent. A key of another type is an error and remains unchanged.
func (l *Limiter) TrySetRate(ctx context.Context, c Config) (bool, error) {
	set, err := l.configure(ctx, trySetRateScript, c)
	return set == 1, err
}

// SetRate gives the limiter a configuration, whether it has one or not. Permits that were acquired before count for
// the new rate as well, unless PerClient changes: with a lower rate, none are acquired until enough of them have expired. Waiters
// learn the new rate. With PerClient, another client of redlatch learns it with its next acquisition. A client of Redisson
// may keep the old rate for as long as it uses it.
// SetRate blocks as TrySetRate does.
//
// Redisson's setRate forgets the permits that were acquired, unless it gets keepState(true).
func (l *Limiter) SetRate(ctx context.Context, c Config) error {
	_, err := l.configure(ctx, setRateScript, c)
	return err
}

func (l *Limiter) configure(ctx context.Context, script *wire.Script, c Config) (int64, error) {
	const op = "set rate"
	if err := cmp.Or(l.check(ctx), invalid(c.check())); err != nil {
		return 0, l.object().Refused(op, err)
	}
	return l.change(ctx, op, script, l.keys, c.args()...)
}

// Release gives n permits back that were acquired and not used, and returns how many of them still counted: the
// others have expired. Any client may release permits. Release tries even if ctx is done, and blocks until the
// server has answered, for about 5 s at most. The error matches lock.ErrIndeterminate if the server did not
// answer: the permits may or may not have been released. It matches ErrNotFound if there is no limiter. For 0
// permits Release does nothing.
//
// Redisson's release, which 3.23 does not have, counts the permits twice: once, and again when they expire.
func (l *Limiter) Release(ctx context.Context, n int) (int, error) {
	const op = "release"
	if err := cmp.Or(l.check(ctx), checkCount(n, 0)); err != nil || n == 0 {
		return 0, l.object().Refused(op, err)
	}
	if !l.s.Stay() {
		return 0, l.object().Refused(op, lock.ErrClosed)
	}
	defer l.s.Leave() // Close waits for the release

	keys := append(slices.Clip(l.keys), wire.RateReply(l.key, wire.NewRequestID()))
	released, err := l.change(context.WithoutCancel(ctx), op, releaseScript, keys, strconv.Itoa(n), wire.Millis(replyTTL))
	return int(released), err
}

// Delete deletes the limiter, with the permits that were acquired, and reports whether there was one. If a reply is
// lost, it may report true for a limiter that was already deleted. Callers that wait get ErrNotFound, unless they create the limiter again
// (see Rate). If the limiter is PerClient, the permits of other clients stay until they expire. Delete blocks
// as TrySetRate does.
func (l *Limiter) Delete(ctx context.Context) (bool, error) {
	if err := l.check(ctx); err != nil {
		return false, l.object().Refused("delete", err)
	}
	deleted, err := l.change(ctx, "delete", deleteScript, l.keys)
	return deleted == 1, err
}

// change runs a script that can be repeated, and returns its reply. If it may have run before, its last argument
// says so.
func (l *Limiter) change(ctx context.Context, op string, script *wire.Script, keys []string, args ...string) (int64, error) {
	began := time.Now()
	if ctx.Err() != nil {
		return 0, l.object().Failed(ctx, op, began, lock.ErrUnavailable)
	}

	args = append([]string{l.s.Publish, l.channel}, args...)
	mayHaveRun := false
	var n int64
	_, err := l.s.RetryWrite(ctx, began.Add(patience), func(ctx context.Context) error {
		all := append(slices.Clip(args), wire.Flag(mayHaveRun))
		parts, err := wire.List(script.Exec(ctx, l.s.Client, keys, all), 1, 1)
		if err == nil {
			n, err = wire.Range{Least: -1, Most: MaxRate}.Number(parts[0])
		}
		mayHaveRun = mayHaveRun || wire.IsUnknown(err)
		return err
	}, wire.IsRefused)
	if err == nil && n < 0 {
		return 0, l.notFound(op, began)
	}
	if err == nil {
		return n, nil
	}

	if mayHaveRun {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return 0, l.object().Failed(ctx, op, began, err)
}

// notFound returns the error of a call that found no limiter.
func (l *Limiter) notFound(op string, began time.Time) error {
	return &lock.Error{Op: op, Kind: kind, Name: l.id.Name, Waited: time.Since(began), Err: errMissing}
}

// Config returns the configuration of the limiter on the server. If there is none, the error matches ErrNotFound,
// also with the option Rate. It blocks for one round trip.
func (l *Limiter) Config(ctx context.Context) (Config, error) {
	if err := l.check(ctx); err != nil {
		return Config{}, l.object().Refused("read", err)
	}

	began := time.Now()
	fields, err := wire.List(wire.Read(ctx, l.s.Client, "HMGET", l.key, "rate", "interval", "type", "keepAliveTime"), 4, 4)
	if err == nil && (fields[0].IsNil() || fields[1].IsNil() || fields[2].IsNil()) {
		return Config{}, l.notFound("read", began)
	}

	var c Config
	if err == nil {
		c, err = decodeConfig(fields)
	}
	return c, l.object().ReadFailed(ctx, "read", began, err)
}

// decodeConfig decodes the fields of a configuration. Redisson's of old have no keepAliveTime.
func decodeConfig(fields []rueidis.RedisMessage) (Config, error) {
	var numbers [4]int64
	for i, field := range fields {
		if field.IsNil() {
			continue
		}
		text, err := wire.Text(field)
		if err != nil {
			return Config{}, err
		}
		if numbers[i], err = strconv.ParseInt(text, 10, 64); err != nil {
			return Config{}, fmt.Errorf("%w: %.40q", wire.ErrWrongType, text)
		}
	}

	return Config{
		Rate: int(min(numbers[0], math.MaxInt)), Per: wire.Duration(numbers[1]),
		PerClient: numbers[2] == 1, KeepAlive: wire.Duration(numbers[3]),
	}, nil
}

// Available returns the number of permits that can be acquired now, unless others wait for them. With the option
// Rate, a limiter that does not exist has all of them; otherwise the error matches ErrNotFound. Available
// writes nothing and blocks for one round trip.
func (l *Limiter) Available(ctx context.Context) (int, error) {
	if err := l.check(ctx); err != nil {
		return 0, l.object().Refused("read", err)
	}

	began := time.Now()
	parts, err := wire.List(availableScript.Exec(ctx, l.s.Client, l.keys, nil), 1, 2)
	if err != nil {
		return 0, l.object().ReadFailed(ctx, "read", began, err)
	}
	if len(parts) == 1 && l.config.Rate > 0 {
		return l.config.Rate, nil
	}
	if len(parts) == 1 {
		return 0, l.notFound("read", began)
	}

	free, err := wire.Any.Number(parts[0])
	return int(max(free, 0)), l.object().ReadFailed(ctx, "read", began, err)
}

func checkCount(n, least int) error {
	if n < least || n > MaxRate {
		return fmt.Errorf("%w: %d permits: must be from %d to %d", lock.ErrInvalid, n, least, MaxRate)
	}
	return nil
}
