package inspect

import (
	"context"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/wire"
)

// countPlain adds the subscribers of plain channels in a cluster, which may be connected to any node. If
// a node does not answer, all numbers become -1. It blocks for the replies of all nodes.
func (r *Reader) countPlain(ctx context.Context, calls []wire.Call, snapshots []snapshot) {
	ofObject, ofWaiters := make([][]string, len(calls)), make([][]string, len(calls))
	var all []string
	for i, s := range snapshots {
		key := calls[i].Keys[mainKey]
		ofObject[i] = channelsOf(key)
		for j := range s.waiters {
			ofWaiters[i] = append(ofWaiters[i], waiterPrefix(key)+s.keys[queueKey].elements[j])
		}
		all = append(append(all, ofObject[i]...), ofWaiters[i]...)
	}

	total, known := r.numsub(ctx, all)
	add := func(counts []int, channels []string) {
		for i, channel := range channels {
			if counts[i] += int(total[channel]); !known {
				counts[i] = -1
			}
		}
	}
	for i, s := range snapshots {
		add(s.channels, ofObject[i])
		add(s.waiters, ofWaiters[i])
	}
}

// numsub returns the number of subscribers of channels at all nodes, and whether all nodes have answered.
func (r *Reader) numsub(ctx context.Context, channels []string) (total map[string]int64, known bool) {
	nodes := r.Conn.Nodes()
	replies := make(chan rueidis.RedisResult, len(nodes))
	for _, node := range nodes {
		go func() { replies <- node.Do(ctx, node.B().PubsubNumsub().Channel(channels...).Build()) }()
	}
	total, known = map[string]int64{}, true
	for range nodes {
		counts, err := (<-replies).AsIntMap()
		known = known && err == nil
		for channel, n := range counts {
			total[channel] += n
		}
	}
	return total, known
}
