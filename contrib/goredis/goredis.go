package goredis

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// Options are the options of go-redis for a server, a cluster, a server with sentinels, and any of these.
type Options interface {
	*redis.Options | *redis.ClusterOptions | *redis.FailoverOptions | *redis.UniversalOptions
}

// Open returns a redlatch client for the server that a go-redis client with these options uses. It
// blocks like redlatch.New, and its errors are those of ClientOption and redlatch.New.
func Open[O Options](ctx context.Context, opt O, opts ...redlatch.Option) (*redlatch.Client, error) {
	return open(ctx, opts)(ClientOption(opt))
}

// OpenLike returns a redlatch client for the server that a go-redis client uses. It is Open for the
// options of that client, with the limits that ClientOptionLike has. The two clients share no
// connection and are closed separately.
func OpenLike(ctx context.Context, client redis.UniversalClient, opts ...redlatch.Option) (*redlatch.Client, error) {
	return open(ctx, opts)(ClientOptionLike(client))
}

func open(ctx context.Context, opts []redlatch.Option) func(rueidis.ClientOption, error) (*redlatch.Client, error) {
	return func(opt rueidis.ClientOption, err error) (*redlatch.Client, error) {
		if err != nil {
			return nil, err
		}
		return redlatch.New(ctx, opt, opts...)
	}
}

// ClientOption translates options of go-redis to options for redlatch.New, for settings that go-redis
// does not have. It does not change opt and sends nothing. The error matches lock.ErrInvalid if opt is
// nil or cannot be translated.
func ClientOption[O Options](opt O) (rueidis.ClientOption, error) {
	if opt == nil {
		return invalid("the options are nil")
	}
	var out rueidis.ClientOption
	var err error
	switch o := any(opt).(type) {
	case *redis.Options:
		out, err = standalone(o)
	case *redis.ClusterOptions:
		out, err = cluster(o)
	case *redis.FailoverOptions:
		out, err = failover(o)
	case *redis.UniversalOptions:
		out, err = universal(*o)
	}
	if err != nil {
		return rueidis.ClientOption{}, err
	}
	return out, nil
}

// ClientOptionLike is ClientOption for the options of a client, which is a *redis.Client, a
// *redis.ClusterClient, or a type that embeds one of these. A client of NewFailoverClient or
// NewFailoverClusterClient does not reveal its sentinels, and for a *redis.Ring a lock has no server:
// for these and others the error matches lock.ErrInvalid. Hooks of the client are not called.
func ClientOptionLike(client redis.UniversalClient) (rueidis.ClientOption, error) {
	switch c := client.(type) {
	case interface{ Options() *redis.Options }:
		if c.Options().Addr == "FailoverClient" { // as go-redis names it
			return invalid("a client with sentinels does not reveal them: use its redis.FailoverOptions")
		}
		return ClientOption(c.Options())
	case interface{ Options() *redis.ClusterOptions }:
		return ClientOption(c.Options())
	default:
		return invalid("a client of type %T", client)
	}
}

func invalid(format string, args ...any) (rueidis.ClientOption, error) {
	err := fmt.Errorf("%w: %s", lock.ErrInvalid, fmt.Sprintf(format, args...))
	return rueidis.ClientOption{}, &lock.Error{Op: "configure", Kind: "adapter", Name: "goredis", Err: err}
}

// universal chooses like redis.NewUniversalClient.
func universal(o redis.UniversalOptions) (rueidis.ClientOption, error) {
	switch {
	case o.MasterName != "":
		// In cluster mode, replicas answer reads only.
		o.ReadOnly = o.ReadOnly && !o.IsClusterMode
		return failover(o.Failover())
	case len(o.Addrs) > 1, o.IsClusterMode:
		return cluster(o.Cluster())
	default:
		return standalone(o.Simple())
	}
}

func standalone(o *redis.Options) (rueidis.ClientOption, error) {
	addr, network := cmp.Or(o.Addr, "localhost:6379"), o.Network
	if network == "" && strings.HasPrefix(addr, "/") {
		network = "unix"
	}
	opt, err := translate(common(o), network)
	opt.InitAddress = []string{addr}
	opt.ForceSingleClient = true // else one node of a cluster would stand for all
	return opt, err
}

func cluster(o *redis.ClusterOptions) (rueidis.ClientOption, error) {
	switch {
	case o.ClusterSlots != nil:
		return invalid("ClusterSlots: only the servers can tell which of them has a lock")
	case o.NewClient != nil && reflect.ValueOf(o.NewClient).Pointer() != reflect.ValueOf(redis.NewClient).Pointer():
		return invalid("NewClient: a function may change the options of nodes; set it to nil in a copy if it does not")
	}
	opt, err := translate(common(o), "")
	opt.InitAddress = slices.Clone(o.Addrs)
	opt.ClusterOption.ShardsRefreshInterval = max(o.ClusterStateReloadInterval, 0)
	return opt, err
}

func failover(o *redis.FailoverOptions) (rueidis.ClientOption, error) {
	switch {
	case o.MasterName == "":
		return invalid("MasterName is empty")
	case o.ReplicaOnly && !o.RouteByLatency && !o.RouteRandomly:
		return invalid("ReplicaOnly, or ReadOnly with MasterName: locks cannot be taken on replicas")
	}
	u := common(o)
	opt, err := translate(u, "")
	if err == nil && opt.AuthCredentialsFn != nil {
		return invalid("CredentialsProvider, CredentialsProviderContext or StreamingCredentialsProvider with sentinels, " +
			"which would get these credentials too")
	}
	opt.InitAddress = slices.Clone(o.SentinelAddrs)
	opt.Sentinel = rueidis.SentinelOption{
		MasterSet: o.MasterName, ClientName: opt.ClientName, Dialer: opt.Dialer, TLSConfig: opt.TLSConfig,
	}
	opt.Sentinel.Username, opt.Sentinel.Password = credentials(u.SentinelUsername, u.SentinelPassword)
	return opt, err
}

// common returns the fields of options that all kinds have, with the names that UniversalOptions gives them.
func common(options any) (u redis.UniversalOptions) {
	from, to := reflect.ValueOf(options).Elem(), reflect.ValueOf(&u).Elem()
	for i := range to.NumField() {
		if field := from.FieldByName(to.Type().Field(i).Name); field.IsValid() {
			to.Field(i).Set(field)
		}
	}
	return u
}

// translate translates what all kinds of options have. network is "" for TCP.
func translate(u redis.UniversalOptions, network string) (rueidis.ClientOption, error) {
	if u.OnConnect != nil {
		return invalid("OnConnect: a hook may prepare a connection, and cannot be called for those of redlatch; " +
			"set it to nil in a copy if they do not need it")
	}
	opt := rueidis.ClientOption{
		AuthCredentialsFn: provider(u),
		ClientName:        u.ClientName,
		TLSConfig:         u.TLSConfig,
		AlwaysRESP2:       u.Protocol == 2,
		SelectDB:          max(u.DB, 0),
		ConnLifetime:      max(u.ConnMaxLifetime, 0),
		// Not WriteTimeout, which a write and its reply share here.
		ConnWriteTimeout: max(u.ReadTimeout, 0),
		Dialer:           net.Dialer{Timeout: max(u.DialTimeout, 0)},
	}
	opt.Username, opt.Password = credentials(u.Username, u.Password)
	//lint:ignore SA1019 programs still set the misspelled field
	if u.DisableIdentity || u.DisableIndentity {
		opt.ClientSetInfo = rueidis.DisableClientSetInfo
	}
	if u.Dialer != nil || network != "" && network != "tcp" {
		opt.DialCtxFn = dialer(u.Dialer, cmp.Or(network, "tcp"))
	}
	return opt, nil
}

// dialer returns a function that dials with dial, or itself if dial is nil. As in go-redis, dial is
// responsible for TLS.
func dialer(
	dial func(ctx context.Context, network, addr string) (net.Conn, error), network string,
) func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
	return func(ctx context.Context, addr string, d *net.Dialer, conf *tls.Config) (net.Conn, error) {
		switch {
		case dial != nil:
			ctx, cancel := context.WithTimeout(ctx, d.Timeout)
			defer cancel()
			return dial(ctx, network, addr)
		case conf != nil:
			return (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, network, addr)
		default:
			return d.DialContext(ctx, network, addr)
		}
	}
}
