package wire

import (
	"errors"
	"strings"

	"github.com/redis/rueidis"
)

// meaning is what a server's error says, as far as it matters.
type meaning uint8

const (
	refusal    meaning = iota // the request would be refused again
	trouble                   // the server cannot serve it for now
	replica                   // the server is not the primary
	moved                     // another node serves the key, or none does for now
	divided                   // the keys of the request are on two nodes for now
	cutShort                  // a script has used a key that is not on its node
	deliberate                // the server rejects all writes until its operator acts
	wrongType                 // a key has a value of another type
	denied                    // the user may not do that
	unknown                   // the server does not know the command
	notCached                 // the server does not know the script
	noReply                   // the error is not a server's
)

// codes are the codes with a meaning. The error of a server begins with a code, an upper-case word. The
// words after it differ between servers, so they mean nothing.
var codes = map[string]meaning{
	"BUSY": trouble, "LOADING": trouble, "REDIRECT": trouble,
	"NOAUTH": trouble, "WRONGPASS": trouble, // the credentials rotate
	"MASTERDOWN": replica, "READONLY": replica,
	"ASK": moved, "CLUSTERDOWN": moved, "MOVED": moved,
	"TRYAGAIN":   divided,
	"MISCONF":    deliberate,
	"NOREPLICAS": deliberate,
	"OOM":        deliberate,
	"NOPERM":     denied,
	"NOSCRIPT":   notCached,
	"WRONGTYPE":  wrongType,
}

// phrases are the beginnings of errors without a code of their own that have a meaning. The lines of
// servers that say them are in the tests, which provoke each of them.
var phrases = []struct {
	words   string
	meaning meaning
}{
	{"Script attempted to access a non local key", cutShort},
	{"Lua script attempted to access a non local key", cutShort}, // Redis 6.2
	{"Attempted to access a non local key", cutShort},            // Valkey 9
	{"Script attempted to access a slot not served", cutShort},

	// A cluster without a majority that still serves reads lets a script begin, but not write.
	{"Script attempted to execute a write command while the cluster is down", trouble},
	{"Lua script attempted to execute a write command while the cluster is down", trouble}, // Redis 6.2
	{"Can not execute a write command", trouble},                                           // Valkey 9

	{"Script killed by user", trouble}, // which is possible only before its first write
	{"max number of clients reached", trouble},

	{"value is not an integer", wrongType},
	{"hash value is not an integer", wrongType},

	{"The user executing the script can't", denied}, // Redis
	{"ACL failure in script", denied},               // Valkey

	{"unknown command", unknown},
	{"Unknown Redis command called from", unknown},
	{"Unknown command called from script", unknown}, // Valkey
	{"unknown subcommand", unknown},
	{"Unknown subcommand", unknown}, // Redis 6.2
}

// meaningOf returns the meaning of an error that is or contains a server's.
func meaningOf(err error) meaning {
	reply := replyIn(err)
	if reply == nil {
		return noReply
	}

	text := plain(reply.Error())
	code, _, _ := strings.Cut(text, " ")
	if m, ok := codes[code]; ok {
		return m
	}

	for _, p := range phrases {
		if strings.HasPrefix(text, p.words) {
			return p.meaning
		}
	}

	return refusal
}

// plain returns the text of a server's error without the code ERR, which rueidis omits too, and without
// what Redis 6.2 adds to the error of a command in a script: the name of the script, and one or two
// positions.
//
//	Error running script (call to f_<sha>): @user_script:1: WRONGTYPE Operation against ...
//	Error running script (call to f_<sha>): @user_script:1: @user_script: 1: -OOM command not allowed ...
func plain(text string) string {
	const position = "@user_script:"
	if strings.HasPrefix(text, "Error running script (call to f_") {
		if i := strings.Index(text, position); i >= 0 {
			text = text[i:]
		}
	}
	for {
		line, ok := strings.CutPrefix(text, position)
		if !ok {
			break
		}
		_, cause, ok := strings.Cut(strings.TrimPrefix(line, " "), ": ")
		if !ok {
			break
		}
		text = cause
	}

	return strings.TrimPrefix(strings.TrimPrefix(text, "-"), "ERR ")
}

// IsDenied reports whether err says that the user may not run a command or that the server does not
// know it.
func IsDenied(err error) bool {
	m := meaningOf(err)
	return m == denied || m == unknown
}

// IsReplica reports whether err says that the server is not the primary.
func IsReplica(err error) bool { return meaningOf(err) == replica }

// IsElsewhere reports whether err says that another node serves the key or channel, or none does for
// now.
func IsElsewhere(err error) bool {
	m := meaningOf(err)
	return m == moved || m == divided
}

// replyIn returns the server's reply that err is or contains, or nil.
func replyIn(err error) *rueidis.RedisError {
	if err == nil {
		return nil
	}

	reply, ok := err.(*rueidis.RedisError)
	if !ok {
		var inside *rueidis.RedisError // an allocation
		errors.As(err, &inside)
		reply = inside
	}
	if reply == nil || reply.IsNil() {
		return nil
	}

	return reply
}
