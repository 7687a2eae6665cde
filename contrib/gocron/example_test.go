package redlatchgocron_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/go-co-op/gocron/v2"

	redlatchgocron "github.com/redlatch/redlatch/contrib/gocron"
	"github.com/redlatch/redlatch/internal/harness"
)

// The first of several machines runs the job. Its context ends if it loses its lock.
func ExampleLocker() {
	client, stop := harness.Connect()
	defer stop()
	locker, err := redlatchgocron.NewLocker(client, time.Minute, redlatchgocron.MaxHold(time.Hour))
	if err != nil {
		log.Fatal(err)
	}
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	if err != nil {
		log.Fatal(err)
	}
	ran := make(chan struct{})
	_, err = scheduler.NewJob(
		gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()), // gocron.CronJob("0 * * * *", false) in a program
		gocron.NewTask(func(ctx context.Context) {
			ctx = locker.Context(ctx)
			fmt.Println("writes the report:", ctx.Err() == nil)
			close(ran)
		}),
		gocron.WithName("report"),
	)
	if err != nil {
		log.Fatal(err)
	}
	scheduler.Start()
	<-ran
	if err := scheduler.Shutdown(); err != nil {
		log.Fatal(err)
	}
	// Output: writes the report: true
}

// All jobs run on the machine that leads.
func ExampleElector() {
	client, stop := harness.Connect()
	defer stop()
	elector, err := redlatchgocron.NewElector(context.Background(), client, "scheduler", "host-7")
	if err != nil {
		log.Fatal(err)
	}
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedElector(elector))
	if err != nil {
		log.Fatal(err)
	}
	ran := make(chan struct{}, 1)
	_, err = scheduler.NewJob(
		gocron.DurationJob(10*time.Millisecond),
		gocron.NewTask(func() {
			select {
			case ran <- struct{}{}:
			default:
			}
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	scheduler.Start()
	<-ran
	fmt.Println("leads and runs the job")
	if err := scheduler.Shutdown(); err != nil {
		log.Fatal(err)
	}
	elector.Close() // after the scheduler, so that another machine leads when no job runs here
	// Output: leads and runs the job
}
