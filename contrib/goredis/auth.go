package goredis

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
	"github.com/redis/rueidis"
)

const (
	// defaultProviderTimeout bounds a provider, which may ask another service, if there is no
	// DialTimeout. It is the default of go-redis.
	defaultProviderTimeout = 5 * time.Second

	// refreshInterval is the time after which a connection gets the credentials of a
	// StreamingCredentialsProvider anew.
	refreshInterval = time.Minute
)

// provider returns a function that asks the provider of credentials that go-redis would ask, or nil if
// there is none.
func provider(u redis.UniversalOptions) func(rueidis.AuthCredentialsContext) (rueidis.AuthCredentials, error) {
	var ask func() (username, password string, err error)
	var refresh time.Duration
	switch {
	case u.StreamingCredentialsProvider != nil:
		if u.Protocol != 2 { // a subscriber of RESP2 cannot log in again, and would lose its connection
			refresh = refreshInterval
		}
		ask = func() (username, password string, err error) {
			c, unsubscribe, err := u.StreamingCredentialsProvider.Subscribe(&listener{})
			if err != nil {
				return "", "", err
			}
			if unsubscribe != nil {
				defer func() { _ = unsubscribe() }() // the credentials are valid in any case
			}
			username, password = c.BasicAuth()
			return username, password, nil
		}
	case u.CredentialsProviderContext != nil:
		ask = func() (string, string, error) {
			timeout := defaultProviderTimeout
			if u.DialTimeout > 0 {
				timeout = u.DialTimeout
			}
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			return u.CredentialsProviderContext(ctx)
		}
	case u.CredentialsProvider != nil:
		ask = func() (username, password string, err error) {
			username, password = u.CredentialsProvider()
			return username, password, nil
		}
	default:
		return nil
	}
	return func(rueidis.AuthCredentialsContext) (c rueidis.AuthCredentials, err error) {
		username, password, err := ask()
		c.Username, c.Password = credentials(username, password)
		if refresh > 0 {
			c.RefreshAfter = time.Now().Add(refresh)
		}
		return c, err
	}
}

// listener ignores the changes of credentials: they are asked for when they are needed. It has a size, so
// that every subscription is one of its own.
type listener struct{ _ byte }

func (*listener) OnNext(auth.Credentials) {}
func (*listener) OnError(error)           {}

// credentials returns what go-redis sends: without a password it does not log in.
func credentials(username, password string) (string, string) {
	if password == "" {
		return "", ""
	}
	return username, password
}
