package redlatchcron_test

import (
	"context"
	"fmt"
	"log"

	"github.com/robfig/cron/v3"

	redlatchcron "github.com/redlatch/redlatch/contrib/cron"
	"github.com/redlatch/redlatch/internal/harness"
)

// Two machines have the same job in their schedules. One of them runs it each time.
func ExampleAdd() {
	client, stop := harness.Connect()
	defer stop()
	done := make(chan struct{}, 100)
	for range 2 {
		jobs := cron.New(cron.WithSeconds())
		_, err := redlatchcron.Add(jobs, "*/2 * * * * *", client.Once("report"), func(context.Context) error {
			fmt.Println("the report is written")
			done <- struct{}{}
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
		jobs.Start()
		defer func() { <-jobs.Stop().Done() }()
	}
	<-done
	// Output:
	// the report is written
}
