package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// BenchmarkMultiLock measures three uncontended locks, acquired and released by a MultiLock
// and one after the other. "ratio" is how many times longer the latter takes. Both run in
// turns, so that they see the same machine.
func BenchmarkMultiLock(b *testing.B) {
	const names = 3
	ctx := context.Background()
	of := func(c *redlatch.Client, g int) (members []lock.Locker) {
		for i := range names {
			members = append(members, c.Lock("multi-"+strconv.Itoa(g)+"-"+strconv.Itoa(i)))
		}
		return members
	}
	together := func(c *redlatch.Client) func(g int) error {
		return func(g int) error {
			h, err := c.MultiLock(of(c, g)...).Lock(ctx)
			if err != nil {
				return err
			}
			return h.Unlock(ctx)
		}
	}
	oneByOne := func(c *redlatch.Client) func(g int) error {
		return func(g int) error {
			var holds []lock.Hold
			for _, l := range of(c, g) {
				h, err := l.Lock(ctx)
				if err != nil {
					return err
				}
				holds = append(holds, h)
			}
			for _, h := range slices.Backward(holds) {
				if err := h.Unlock(ctx); err != nil {
					return err
				}
			}
			return nil
		}
	}
	// inTurn runs n rounds on each of the goroutines.
	inTurn := func(goroutines int, way func(g int) error) error {
		const rounds = 20
		errs := make(chan error, goroutines)
		for g := range goroutines {
			go func() {
				var err error
				for n := 0; n < rounds && err == nil; n++ {
					err = way(g)
				}
				errs <- err
			}()
		}
		var err error
		for range goroutines {
			err = errors.Join(err, <-errs)
		}
		return err
	}
	for _, goroutines := range []int{1, 64} {
		for name, way := range map[string]func(*redlatch.Client) func(int) error{"together": together, "one by one": oneByOne} {
			b.Run(fmt.Sprintf("%s/goroutines=%d", name, goroutines), func(b *testing.B) {
				pairs(b, goroutines, way(open(b)))
			})
		}
		b.Run(fmt.Sprintf("ratio/goroutines=%d", goroutines), func(b *testing.B) {
			c := open(b)
			var took [2]time.Duration
			for b.Loop() {
				for i, way := range []func(int) error{together(c), oneByOne(c)} {
					begin := time.Now()
					if err := inTurn(goroutines, way); err != nil {
						b.Fatal(err)
					}
					took[i] += time.Since(begin)
				}
			}
			b.ReportMetric(took[1].Seconds()/took[0].Seconds(), "ratio")
		})
	}
}
