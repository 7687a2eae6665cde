package wire

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

// Process is where a client of redlatch runs.
type Process struct {
	Host string `json:"host"` // empty if the process did not know it
	PID  int    `json:"pid"`  // in the process namespace of a container
}

const connectionPrefix = "redlatch:"

// ConnectionName returns the name of the connections of a client of this process:
// redlatch:<client id>:<host>:<process id>. In the name of the host, characters that CLIENT SETNAME
// does not accept become question marks.
func ConnectionName(client string) string {
	host, _ := os.Hostname() // the name is for people: without a host it still has the rest
	return connectionName(client, Process{host, os.Getpid()})
}

func connectionName(client string, p Process) string {
	host := strings.Map(func(r rune) rune {
		if r < '!' || r > '~' {
			return '?'
		}
		return r
	}, p.Host)
	return fmt.Sprintf("%s%s:%s:%d", connectionPrefix, client, host, p.PID)
}

// ParseConnectionName returns the id of the client and the process of a name that ConnectionName has
// made, and whether it is one. The host may contain colons.
func ParseConnectionName(name string) (client string, p Process, ok bool) {
	rest, ok := strings.CutPrefix(name, connectionPrefix)
	if !ok {
		return "", p, false
	}
	client, rest, _ = strings.Cut(rest, ":")
	end := strings.LastIndexByte(rest, ':')
	if end < 0 || uuid.Validate(client) != nil {
		return "", p, false
	}
	pid, err := strconv.Atoi(rest[end+1:])
	if err != nil || pid <= 0 {
		return "", p, false
	}
	return client, Process{rest[:end], pid}, true
}
