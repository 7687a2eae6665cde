package once_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/once"
)

// Every machine that has the job in its schedule calls Run; one of them does the work.
func ExampleOnce_Run() {
	client, stop := harness.Connect()
	defer stop()
	ctx := context.Background()
	job := client.Once("report", once.Remember(2*time.Hour))
	due := time.Date(2026, 10, 25, 12, 0, 0, 0, time.UTC)
	for range 3 { // three machines
		ran, err := job.Run(ctx, once.At(due), func(context.Context) error {
			fmt.Println("the report of", due.Format(time.DateOnly))
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("ran:", ran)
	}
	// Output:
	// the report of 2026-10-25
	// ran: true
	// ran: false
	// ran: false
}
