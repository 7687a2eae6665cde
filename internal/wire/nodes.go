package wire

import (
	"context"
	"iter"

	"github.com/redis/rueidis"
)

// AskNodes calls ask for all nodes concurrently, and returns the answers that come before ctx
// ends.
func AskNodes[T any](
	ctx context.Context, conn rueidis.Client, ask func(addr string, node rueidis.Client) T,
) iter.Seq[T] {
	return func(yield func(T) bool) {
		nodes := conn.Nodes()
		answers := make(chan T, len(nodes))
		for addr, node := range nodes {
			go func() { answers <- ask(addr, node) }()
		}
		for range nodes {
			select {
			case answer := <-answers:
				if !yield(answer) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}
