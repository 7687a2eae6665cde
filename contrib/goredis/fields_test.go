package goredis_test

import (
	"context"
	"crypto/tls"
	"errors"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/contrib/goredis"
	"github.com/redlatch/redlatch/lock"
)

// The categories of fields are the sections of the package's documentation.
const (
	translated    = "Translated fields"
	refused       = "Refused fields"
	withoutEffect = "Fields without effect"
)

// documented returns the category of each field that the package's documentation names: a list item is
// "Name, Name: text".
func documented(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, parser.ParseComments)
	require.NoError(t, err)
	var section string
	fields := map[string]string{}
	for _, block := range new(comment.Parser).Parse(file.Doc.Text()).Content {
		switch block := block.(type) {
		case *comment.Heading:
			section = plain(block.Text)
		case *comment.List:
			for _, item := range block.Items {
				names, text, ok := strings.Cut(plain(item.Content[0].(*comment.Paragraph).Text), ":")
				require.True(t, ok && text != "", "no reason: %s", names)
				for name := range strings.SplitSeq(names, ",") {
					name = strings.TrimSpace(name)
					require.True(t, ast.IsExported(name), "not a field: %q", name)
					require.NotContains(t, fields, name, "named twice")
					fields[name] = section
				}
			}
		}
	}
	return fields
}

func plain(text []comment.Text) string {
	var s strings.Builder
	for _, t := range text {
		switch t := t.(type) {
		case comment.Plain:
			s.WriteString(string(t))
		case *comment.DocLink:
			s.WriteString(plain(t.Text))
		}
	}
	return strings.ReplaceAll(s.String(), "\n", " ")
}

// clientOption is ClientOption for any of the types that it accepts.
func clientOption(options any) (rueidis.ClientOption, error) {
	switch o := options.(type) {
	case *redis.Options:
		return goredis.ClientOption(o)
	case *redis.ClusterOptions:
		return goredis.ClientOption(o)
	case *redis.FailoverOptions:
		return goredis.ClientOption(o)
	default:
		return goredis.ClientOption(o.(*redis.UniversalOptions))
	}
}

// bases returns valid options of every type and for every kind of server. The passwords make user names
// count.
func bases() map[string]any {
	addrs := []string{"a:1", "b:2"}
	universal := redis.UniversalOptions{Addrs: addrs[:1], Password: "secret", SentinelPassword: "secret"}
	universalCluster, universalFailover := universal, universal
	universalCluster.Addrs, universalFailover.MasterName = addrs, "main"
	return map[string]any{
		"Options":                     &redis.Options{Addr: addrs[0], Password: "secret"},
		"ClusterOptions":              &redis.ClusterOptions{Addrs: addrs, Password: "secret"},
		"FailoverOptions":             &redis.FailoverOptions{MasterName: "main", SentinelAddrs: addrs, Password: "secret", SentinelPassword: "secret"},
		"UniversalOptions":            &universal,
		"UniversalOptions, cluster":   &universalCluster,
		"UniversalOptions, sentinels": &universalFailover,
	}
}

// value returns a value of a field that differs from that of the bases.
func value(t *testing.T, f reflect.StructField) reflect.Value {
	t.Helper()
	picker := redis.NewClusterClient(&redis.ClusterOptions{})
	defer picker.Close()
	for _, v := range []any{
		"other", 2, true, 7 * time.Second, []string{"c:3", "d:4"}, redis.CSCStrategy(1), &tls.Config{}, streaming{}, limiter{},
		redis.NewLocalCache(redis.CacheConfig{}), redis.NewPushNotificationProcessor(), picker.Options().ShardPicker,
	} {
		switch v := reflect.ValueOf(v); {
		case v.Type() == f.Type, f.Type.Kind() == reflect.Interface && v.Type().Implements(f.Type):
			return v
		}
	}
	switch f.Type.Kind() {
	case reflect.Pointer:
		return reflect.New(f.Type.Elem())
	case reflect.Func:
		return reflect.MakeFunc(f.Type, func([]reflect.Value) []reflect.Value { panic("called") })
	}
	require.Fail(t, "no value for a field", "%s %s", f.Name, f.Type)
	panic("unreachable")
}

type limiter struct{}

func (limiter) Allow() error       { return nil }
func (limiter) ReportResult(error) {}

// streaming is a provider whose credentials never change.
type streaming struct{}

func (streaming) Subscribe(auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	return auth.NewBasicCredentials("alice", "secret"), nil, nil
}

// same reports whether two translations are equal. Functions are equal if both or neither are nil.
func same(a, b rueidis.ClientOption) bool {
	v, w := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range v.NumField() {
		x, y := v.Field(i), w.Field(i)
		if x.Kind() == reflect.Func && x.IsNil() != y.IsNil() ||
			x.Kind() != reflect.Func && !reflect.DeepEqual(x.Interface(), y.Interface()) {
			return false
		}
	}
	return true
}

// The documentation names each field of go-redis's options, and each behaves as its section says. A new
// version of go-redis that has another field fails this test.
func TestEveryField(t *testing.T) {
	fields := documented(t)
	seen, effective, refusing := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for name, base := range bases() {
		before, err := clientOption(base)
		require.NoError(t, err, name)
		elem := reflect.TypeOf(base).Elem()
		for i := range elem.NumField() {
			f := elem.Field(i)
			if !f.IsExported() {
				continue
			}
			require.Contains(t, fields, f.Name, "a field of %s that the documentation does not name", name)
			seen[f.Name] = true
			changed := reflect.New(elem)
			changed.Elem().Set(reflect.ValueOf(base).Elem())
			changed.Elem().Field(i).Set(value(t, f))
			original := reflect.New(elem)
			original.Elem().Set(changed.Elem())
			after, err := clientOption(changed.Interface())
			for j := range elem.NumField() {
				if k := elem.Field(j).Type.Kind(); k != reflect.Func && k != reflect.Interface {
					require.Equal(t, original.Elem().Field(j).String(), changed.Elem().Field(j).String(), "the options have changed")
				}
			}
			key := elem.Name() + "." + f.Name
			switch {
			case err != nil:
				require.ErrorIs(t, err, lock.ErrInvalid, key)
				require.ErrorContains(t, err, f.Name)
				require.Equal(t, rueidis.ClientOption{}, after)
				refusing[key] = true
			case !same(before, after):
				effective[key] = true
			}
			switch fields[f.Name] {
			case translated:
				sentinels := strings.Contains(f.Name, "CredentialsProvider") && before.Sentinel.MasterSet != ""
				require.Equal(t, sentinels, err != nil, "%s in %s: %v", f.Name, name, err)
			case refused:
				require.Error(t, err, "%s in %s", f.Name, name)
			default:
				// Replicas of sentinels, unlike those of a cluster, are asked for everything.
				replica := f.Name == "ReadOnly" && before.Sentinel.MasterSet != ""
				require.Equal(t, replica, err != nil, "%s in %s: %v", f.Name, name, err)
				require.NotContains(t, effective, key)
			}
		}
	}
	for name, section := range fields {
		require.Contains(t, []string{translated, refused, withoutEffect}, section)
		require.True(t, seen[name], "%s is not a field of go-redis", name)
	}
	for _, base := range bases() {
		elem := reflect.TypeOf(base).Elem()
		for field := range elem.Fields() {
			key := elem.Name() + "." + field.Name
			if fields[field.Name] == translated && !refusing[key] {
				require.True(t, effective[key], "%s is not translated", key)
			}
		}
	}
}

func TestTranslation(t *testing.T) {
	conf := &tls.Config{ServerName: "main"}
	got, err := goredis.ClientOption(&redis.UniversalOptions{
		Addrs: []string{"a:1", "b:2"}, MasterName: "main", ClientName: "shop", DB: 3, Protocol: 2, Username: "alice",
		Password: "secret", SentinelUsername: "bob", SentinelPassword: "word", DialTimeout: time.Second,
		ReadTimeout: 2 * time.Second, WriteTimeout: time.Hour, ConnMaxLifetime: time.Minute, TLSConfig: conf,
		DisableIdentity: true,
	})
	require.NoError(t, err)
	require.Equal(t, rueidis.ClientOption{
		InitAddress: []string{"a:1", "b:2"}, ClientName: "shop", SelectDB: 3, AlwaysRESP2: true, Username: "alice",
		Password: "secret", Dialer: net.Dialer{Timeout: time.Second}, ConnWriteTimeout: 2 * time.Second,
		ConnLifetime: time.Minute, TLSConfig: conf, ClientSetInfo: rueidis.DisableClientSetInfo,
		Sentinel: rueidis.SentinelOption{
			MasterSet: "main", ClientName: "shop", Username: "bob", Password: "word", TLSConfig: conf,
			Dialer: net.Dialer{Timeout: time.Second},
		},
	}, got)

	got, err = goredis.ClientOption(&redis.Options{})
	require.NoError(t, err)
	require.Equal(t, rueidis.ClientOption{InitAddress: []string{"localhost:6379"}, ForceSingleClient: true}, got)

	// As in go-redis, -1 is no limit, and neither is -2; a name needs a password.
	got, err = goredis.ClientOption(&redis.Options{
		Addr: "a:1", DB: -1, Username: "alice", DialTimeout: -1, ReadTimeout: -2, ConnMaxLifetime: -1, Protocol: 3,
	})
	require.NoError(t, err)
	require.Equal(t, rueidis.ClientOption{InitAddress: []string{"a:1"}, ForceSingleClient: true}, got)
}

// The kind of server is the one that redis.NewUniversalClient chooses.
func TestUniversalOptions(t *testing.T) {
	translate := func(o redis.UniversalOptions) rueidis.ClientOption {
		t.Helper()
		addrs := slices.Clone(o.Addrs)
		got, err := goredis.ClientOption(&o)
		require.NoError(t, err)
		require.Equal(t, addrs, o.Addrs)
		return got
	}
	got := translate(redis.UniversalOptions{DB: 1})
	require.True(t, got.ForceSingleClient)
	require.Equal(t, []string{"127.0.0.1:6379"}, got.InitAddress)
	require.Equal(t, 1, got.SelectDB)
	for _, o := range []redis.UniversalOptions{
		{Addrs: []string{"a:1", "b:2"}, DB: 1}, {Addrs: []string{"a:1"}, IsClusterMode: true, DB: 1},
	} {
		got = translate(o)
		require.False(t, got.ForceSingleClient)
		require.Equal(t, o.Addrs, got.InitAddress)
		require.Zero(t, got.SelectDB, "go-redis ignores the database in a cluster")
	}
	for _, o := range []redis.UniversalOptions{
		{MasterName: "main", DB: 1}, {MasterName: "main", DB: 1, IsClusterMode: true, ReadOnly: true},
		{MasterName: "main", DB: 1, RouteRandomly: true, ReadOnly: true},
		{MasterName: "main", DB: 1, RouteByLatency: true, ReadOnly: true},
	} {
		got = translate(o)
		require.Equal(t, "main", got.Sentinel.MasterSet)
		require.Equal(t, []string{"127.0.0.1:26379"}, got.InitAddress)
		require.Equal(t, 1, got.SelectDB)
	}
	_, err := goredis.ClientOption(&redis.UniversalOptions{MasterName: "main", ReadOnly: true})
	require.ErrorIs(t, err, lock.ErrInvalid)
}

func TestNilAndIncompleteOptions(t *testing.T) {
	for _, options := range []any{
		(*redis.Options)(nil), (*redis.ClusterOptions)(nil), (*redis.FailoverOptions)(nil), (*redis.UniversalOptions)(nil),
		&redis.FailoverOptions{SentinelAddrs: []string{"a:1"}},
	} {
		_, err := clientOption(options)
		require.ErrorIs(t, err, lock.ErrInvalid)
	}
	_, err := goredis.Open(t.Context(), (*redis.Options)(nil))
	require.ErrorIs(t, err, lock.ErrInvalid)
	_, err = goredis.Open(t.Context(), &redis.ClusterOptions{})
	require.ErrorIs(t, err, lock.ErrInvalid, "no address")
}

// subscriptions is a provider that counts its subscribers and changes its password each time.
type subscriptions struct {
	listeners []auth.CredentialsListener
	active    int
	err       error
}

func (s *subscriptions) Subscribe(l auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	if s.err != nil {
		return nil, nil, s.err
	}
	s.listeners = append(s.listeners, l)
	s.active++
	password := string(rune('a' + len(s.listeners)))
	return auth.NewBasicCredentials("alice", password), func() error { s.active--; return errors.New("late") }, nil
}

// go-redis prefers the streaming provider, then the one with a context.
func TestCredentials(t *testing.T) {
	s := &subscriptions{}
	o := &redis.Options{
		Username: "static", Password: "static", StreamingCredentialsProvider: s,
		CredentialsProvider: func() (string, string) { return "bob", "plain" },
		CredentialsProviderContext: func(ctx context.Context) (string, string, error) {
			deadline, ok := ctx.Deadline()
			require.True(t, ok)
			require.WithinDuration(t, time.Now().Add(time.Minute), deadline, 10*time.Second)
			return "carol", "context", nil
		},
		DialTimeout: time.Minute,
	}
	ask := func() (rueidis.AuthCredentials, error) {
		opt, err := goredis.ClientOption(o)
		require.NoError(t, err)
		return opt.AuthCredentialsFn(rueidis.AuthCredentialsContext{})
	}
	for _, password := range []string{"b", "c"} {
		got, err := ask()
		require.NoError(t, err)
		require.Equal(t, "alice", got.Username)
		require.Equal(t, password, got.Password)
		require.WithinDuration(t, time.Now().Add(time.Minute), got.RefreshAfter, 10*time.Second)
	}
	o.Protocol = 2 // no login but the first
	got, err := ask()
	require.NoError(t, err)
	require.Zero(t, got.RefreshAfter)
	require.Zero(t, s.active)
	require.NotSame(t, s.listeners[0], s.listeners[1])
	s.err = errors.New("no token")
	_, err = ask()
	require.Equal(t, s.err, err)

	o.StreamingCredentialsProvider = nil
	got, err = ask()
	require.NoError(t, err)
	require.Equal(t, rueidis.AuthCredentials{Username: "carol", Password: "context"}, got)
	o.CredentialsProviderContext = func(context.Context) (string, string, error) { return "", "", s.err }
	_, err = ask()
	require.Equal(t, s.err, err)
	o.CredentialsProviderContext = nil
	got, err = ask()
	require.NoError(t, err)
	require.Equal(t, rueidis.AuthCredentials{Username: "bob", Password: "plain"}, got)
	o.CredentialsProvider = func() (string, string) { return "bob", "" }
	got, err = ask()
	require.NoError(t, err)
	require.Equal(t, rueidis.AuthCredentials{}, got)
}

func TestClientsThatCannotBeTranslated(t *testing.T) {
	failover := &redis.FailoverOptions{MasterName: "main", SentinelAddrs: []string{"127.0.0.1:1"}}
	for _, c := range []redis.UniversalClient{
		redis.NewFailoverClient(failover), redis.NewFailoverClusterClient(failover),
		redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}}),
	} {
		_, err := goredis.ClientOptionLike(c)
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = goredis.OpenLike(t.Context(), c)
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.NoError(t, c.Close())
	}
	_, err := goredis.ClientOptionLike(nil)
	require.ErrorIs(t, err, lock.ErrInvalid)
}
