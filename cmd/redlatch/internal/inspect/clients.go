package inspect

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// Connection is what the server knows of the connections of a client that have the name that redlatch gives
// them. Any client may choose that name.
type Connection struct {
	wire.Process
	Address string `json:"address"` // of the oldest connection, as the server sees it
	// Age is the age of the oldest connection, and Idle the time since the last request on any of them, both
	// in whole seconds.
	Age  Millis `json:"connected_ms"`
	Idle Millis `json:"idle_ms"`
}

// clients are the connections of CLIENT LIST, by the ids of their clients.
type clients struct {
	known map[string]Connection
	err   error     // why some may be missing
	until time.Time // when to read them again
}

const (
	// listShare bounds the time that servers spend on CLIENT LIST, which grows with the number of their
	// connections: a reader waits for so many times as long as the last one took.
	listShare = 100
	// listPause is the pause after an error, such as a refusal, which the server may log.
	listPause = time.Minute
)

// Identify sets the connections of the owners that are clients of redlatch. If there are any, it blocks for the
// replies of all nodes to CLIENT LIST, unless the last replies are recent. If the connection of an owner
// may not be among them, Unidentified of the object says why.
func (r *Reader) Identify(ctx context.Context, objects []Object) {
	fresh := false
	for i := range objects {
		o := &objects[i]
		for _, owner := range o.owners() {
			if owner.Library != ownLibrary {
				continue
			}
			if !fresh && !time.Now().Before(r.clients.until) {
				r.clients, fresh = r.list(ctx), true
			}
			if c, ok := r.clients.known[owner.Client]; ok {
				owner.Connection = &c
			} else if r.clients.err != nil {
				o.Unidentified = r.clients.err.Error()
			} else if !fresh {
				o.Unidentified = "the list of connections is too large to be read each time"
			}
		}
	}
}

// owners returns the holders and the queue. What has done the work of a slot has usually ended.
func (o *Object) owners() (all []*Owner) {
	for i := range o.Holders {
		all = append(all, &o.Holders[i].Owner)
	}
	for i := range o.Queue {
		all = append(all, &o.Queue[i].Owner)
	}
	return all
}

// list reads the connections of all nodes. Each client has one that does not subscribe.
func (r *Reader) list(ctx context.Context) clients {
	type answer struct {
		text string
		err  error
	}
	began := time.Now()
	nodes := r.Conn.Nodes()
	answers := make(chan answer, len(nodes))
	for addr, node := range nodes {
		go func() {
			text, err := node.Do(ctx, node.B().ClientList().TypeNormal().Build()).ToString()
			if _, refused := rueidis.IsRedisErr(err); err != nil && !refused {
				err = fmt.Errorf("node %s: %w", addr, err)
			}
			answers <- answer{text, err}
		}()
	}

	all := clients{known: map[string]Connection{}}
	for range nodes {
		a := <-answers
		if a.err != nil {
			all.err = a.err
		}
		for line := range strings.Lines(a.text) {
			all.add(line)
		}
	}

	all.until = time.Now().Add(listShare * time.Since(began))
	if all.err != nil {
		all.until = time.Now().Add(listPause)
	}
	return all
}

// add adds a line of CLIENT LIST if it is about a connection of redlatch.
func (all *clients) add(line string) {
	var next Connection
	id, found := "", false
	for field := range strings.FieldsSeq(line) {
		name, value, _ := strings.Cut(field, "=")
		switch name {
		case "addr":
			next.Address = value
		case "name":
			id, next.Process, found = wire.ParseConnectionName(value)
		case "age":
			next.Age = seconds(value)
		case "idle":
			next.Idle = seconds(value)
		}
	}
	if !found {
		return
	}

	if c, ok := all.known[id]; ok {
		next.Idle = min(next.Idle, c.Idle)
		if c.Age >= next.Age {
			next.Address, next.Age = c.Address, c.Age
		}
	}
	all.known[id] = next
}

// seconds parses a number of seconds of the server.
func seconds(text string) Millis {
	n, _ := strconv.ParseInt(text, 10, 32)
	return Millis(time.Duration(n) * time.Second)
}
