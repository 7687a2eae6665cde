package pubsub

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// topology maps slots to primaries. rueidis does not expose its own map.
type topology struct {
	ranges []slotRange
	asked  time.Time
}

type slotRange struct {
	first, last int64
	primary     string
}

// refreshInterval bounds how often the nodes are asked: channels lose their connection
// in bursts.
const refreshInterval = 100 * time.Millisecond

// refresh asks all nodes and uses the first answer: a hanging node must not delay the
// channels of the others. Without any answer it keeps the previous map. Each request
// has its own context, which the first answer does not cancel: rueidis dials a node
// with the context of the first request for it, and other requests may share that dial.
func (t *topology) refresh(ctx context.Context, nodes map[string]rueidis.Client) {
	if time.Since(t.asked) < refreshInterval {
		return
	}
	answers := make(chan []slotRange, len(nodes))
	for addr, node := range nodes {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, topologyTimeout)
			defer cancel()
			reply, _ := node.Do(wire.Shared(ctx), node.B().ClusterSlots().Build()).ToArray()
			answers <- parseSlots(reply, addr)
		}()
	}
	patience, cancel := context.WithTimeout(ctx, topologyTimeout)
	defer cancel()
	for range nodes {
		select {
		case ranges := <-answers:
			if len(ranges) > 0 {
				t.ranges, t.asked = ranges, time.Now()
				return
			}
		case <-patience.Done():
			return
		}
	}
}

// parseSlots parses a reply to CLUSTER SLOTS from the node at asked. A node that does
// not know its own address leaves it empty.
func parseSlots(reply []rueidis.RedisMessage, asked string) []slotRange {
	var ranges []slotRange
	for i := range reply {
		entry, err := reply[i].ToArray()
		if err != nil || len(entry) < 3 {
			continue
		}
		first, err1 := entry[0].AsInt64()
		last, err2 := entry[1].AsInt64()
		primary, err3 := entry[2].ToArray()
		if err1 != nil || err2 != nil || err3 != nil || len(primary) < 2 {
			continue
		}
		host, _ := primary[0].ToString()
		if host == "" {
			host, _, _ = net.SplitHostPort(asked)
		}
		port, err := primary[1].AsInt64()
		if err != nil {
			continue
		}
		ranges = append(ranges, slotRange{first, last, net.JoinHostPort(host, strconv.FormatInt(port, 10))})
	}
	return ranges
}

// primary returns the address of the node that owns the channel's slot, "" if unknown.
func (t *topology) primary(channel string) string {
	slot := int64(wire.Slot(channel))
	for _, r := range t.ranges {
		if r.first <= slot && slot <= r.last {
			return r.primary
		}
	}
	return ""
}
