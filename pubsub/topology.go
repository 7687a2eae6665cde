package pubsub

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// topology knows which primary owns a slot. rueidis knows too, but keeps it to
// itself.
type topology struct {
	ranges []slotRange
	asked  time.Time
}

type slotRange struct {
	first, last int64
	primary     string
}

// refreshInterval bounds how often the nodes are asked: channels become
// homeless in bursts.
const refreshInterval = 100 * time.Millisecond

// refresh asks all nodes and believes the first that answers: one that hangs
// must not hold up the channels of the others. If none answers, what was known
// stays. Nobody else is cut short by its end: rueidis connects to a node under
// the context of who needs it first, for all who need it, so every question has
// a context of its own, which the first answer does not end.
func (t *topology) refresh(ctx context.Context, nodes map[string]rueidis.Client) {
	if time.Since(t.asked) < refreshInterval {
		return
	}
	answers := make(chan []slotRange, len(nodes))
	for addr, node := range nodes {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, lookTimeout)
			defer cancel()
			reply, _ := node.Do(wire.Shared(ctx), node.B().ClusterSlots().Build()).ToArray()
			answers <- parseSlots(reply, addr)
		}()
	}
	patience, cancel := context.WithTimeout(ctx, lookTimeout)
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

// parseSlots reads the reply of CLUSTER SLOTS that the node at asked gave. A
// node that does not know its own address leaves it empty.
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

// primary returns the address of the node that owns the channel's slot, or ""
// if that is not known.
func (t *topology) primary(channel string) string {
	slot := int64(wire.Slot(channel))
	for _, r := range t.ranges {
		if r.first <= slot && slot <= r.last {
			return r.primary
		}
	}
	return ""
}
