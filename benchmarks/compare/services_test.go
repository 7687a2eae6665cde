package main

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
)

// Two contenders of each other peer exclude each other, and nothing is left after its server
// is stopped.
func TestOtherServers(t *testing.T) {
	t.Parallel()
	for store := range daemons {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			var s services
			defer s.stop()
			for _, peer := range otherPeers {
				of := cell{task: task{Kind: "lock"}}.taskOf(peer)
				if stores[of.Peer] != store || peer == curator { // make bench builds the latter
					continue
				}
				var err error
				of.Addrs, err = s.addrs(of.Peer, 1)
				if errors.Is(err, errMissing) {
					return // as the report says
				}
				if err != nil {
					t.Fatal(err)
				}
				t.Log(peer)
				before, err := s.look(of)
				if err != nil {
					t.Fatal(err)
				}
				exclude(t, of)
				after, err := s.look(of)
				if err != nil {
					t.Fatal(err)
				}
				counts := store == "etcd" || store == "zookeeper"
				if n := after.commands - before.commands; counts && n < 4 || !counts && n != 0 {
					t.Errorf("%d requests were counted for two pairs", n)
				}
			}
			d := s.others[store]
			s.stop()
			if err := syscall.Kill(d.cmd.Process.Pid, 0); err == nil {
				t.Error("the server still runs")
			}
			if _, err := os.Stat(d.dir); !errors.Is(err, os.ErrNotExist) {
				t.Error("its files are still there")
			}
		})
	}
}

func exclude(t *testing.T, of task) {
	ctx := t.Context()
	s, err := open(ctx, of)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	var ops [2]operation
	for i := range ops {
		if ops[i], err = s.operation(ctx, of, "orders"); err != nil {
			t.Fatal(err)
		}
	}
	if err := ops[0].acquire(ctx); err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() { second <- ops[1].acquire(ctx) }()
	select {
	case err := <-second:
		t.Fatalf("two holders, or the second failed: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if err := ops[0].release(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-second; err != nil {
		t.Fatal(err)
	}
	if err := ops[1].release(ctx); err != nil {
		t.Fatal(err)
	}
	if err := ops[1].release(ctx); err == nil {
		t.Error("a lock that is not held can be released")
	}
}
