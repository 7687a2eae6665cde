package redlatch

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/lock"
)

// urlParameters are the parameters of a URL, with their values where all others would have no effect:
// New disables caching and the resending of commands. rueidis.ParseURL reads those that do not begin
// with "sentinel_".
var urlParameters = map[string][]string{
	"addr": nil, "client_cache": {"0"}, "client_name": nil, "db": nil, "dial_timeout": nil, "master_set": nil,
	"max_retries": {"0"}, "protocol": {"2", "3"}, "sentinel_password": nil, "sentinel_username": nil, "skip_verify": nil,
	"write_timeout": nil,
}

var (
	errMalformed = errors.New("it is malformed; special characters in a password must be escaped")
	errComma     = errors.New("a comma cannot separate hosts: use redis://host1:port?addr=host2:port&addr=host3:port")
)

// ParseURL converts a URL that Open accepts to options for New, for settings that a URL cannot
// express. It returns an error that matches lock.ErrInvalid if the URL is invalid. The text of
// the error contains no password.
func ParseURL(url string) (rueidis.ClientOption, error) {
	opt, err := parseURL(url)
	if err != nil {
		return rueidis.ClientOption{}, ofClient.Refused("connect", fmt.Errorf("%w: server URL: %w", lock.ErrInvalid, err))
	}
	return opt, nil
}

// parseURL is rueidis.ParseURL, but returns an error for what that ignores.
func parseURL(text string) (opt rueidis.ClientOption, err error) {
	_, authority, hasScheme := strings.Cut(text, "://")
	rest := ""
	if i := strings.IndexAny(authority, "/?#"); i >= 0 {
		authority, rest = authority[:i], authority[i:]
	}
	u, parseErr := url.Parse(text)
	switch {
	case text == "":
		return opt, errors.New("it is empty")
	case !hasScheme:
		return opt, errors.New("it has no scheme, as in redis://user:password@host:port")
	case strings.Contains(authority[strings.LastIndex(authority, "@")+1:], ","):
		return opt, errComma
	case parseErr != nil, u.Fragment != "", u.User == nil && strings.HasPrefix(u.Host, ":"):
		return opt, errMalformed // the text of parseErr contains the URL, and the port may be a password
	case u.Scheme == "unix" && u.Host != "":
		return opt, errors.New("a socket needs three slashes, as in unix:///var/run/redis.sock")
	}

	if opt, err = rueidis.ParseURL(text); err != nil {
		// A value that follows the colon may be a password in a wrong place.
		what, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "redis: "), ":")
		err = errors.New(what)
	} else {
		err = checkParameters(u, opt.TLSConfig != nil)
	}

	// A URL has one scheme, so a plaintext connection to the sentinels would be a surprise, and they
	// say which server is the primary.
	if opt.Sentinel.MasterSet != "" {
		opt.Sentinel.TLSConfig = opt.TLSConfig
		opt.Sentinel.Username = u.Query().Get("sentinel_username")
		opt.Sentinel.Password = u.Query().Get("sentinel_password")
	}
	if err != nil && strings.Contains(rest, "@") {
		err = errMalformed // what precedes the @ may belong to the password
	}
	return opt, err
}

func checkParameters(u *url.URL, tls bool) error {
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return err
	}

	for name, values := range query {
		only, known := urlParameters[name]
		switch {
		case !known:
			return fmt.Errorf("unknown parameter %q: there are %s", name, strings.Join(slices.Sorted(maps.Keys(urlParameters)), ", "))
		case name == "addr":
			for _, addr := range values {
				if err := checkAddr(u, addr); err != nil {
					return err
				}
			}
		case len(values) > 1, name == "db" && u.Scheme != "unix" && u.Path != "":
			return fmt.Errorf("parameter %s: there is more than one value", name)
		case only != nil && !slices.Contains(only, values[0]):
			return fmt.Errorf("parameter %s: must be %s", name, strings.Join(only, " or "))
		case strings.HasPrefix(name, "sentinel_") && !query.Has("master_set"):
			return fmt.Errorf("parameter %s: only with master_set", name)
		case name == "skip_verify" && !tls:
			return errors.New("parameter skip_verify: only for rediss and valkeys")
		}
		if slices.Contains(values, "") && name != "skip_verify" { // whose empty value is true
			return fmt.Errorf("parameter %s: the value is empty", name)
		}
	}

	return nil
}

// checkAddr checks a further address. rueidis would replace one that has no port by the first.
func checkAddr(u *url.URL, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if u.Scheme == "unix" {
		return errors.New("parameter addr: a socket is the only address")
	}
	if strings.Contains(addr, ",") {
		return errComma
	}
	if strings.Contains(addr, "@") {
		return errMalformed
	}
	if addr != "" && (err != nil || host == "" || port == "") {
		return errors.New("parameter addr: a value is not host:port")
	}

	return nil
}
