package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/testserver"
)

// snapshot is the work that servers have done so far. Values that a server does not count are zero.
type snapshot struct {
	commands int
	cpu      time.Duration
	scripts  time.Duration
}

// look reads the snapshot of the servers of a task.
func (s *services) look(t task) (now snapshot, err error) {
	if store := stores[t.Peer]; store != "" {
		return s.others[store].look(store)
	}
	for _, addr := range t.Addrs {
		stats, err := testserver.Info(addr, "commandstats")
		if err != nil {
			return now, err
		}
		now.commands += commands(t.Peer, stats)
		now.scripts += scriptTime(stats)
		used, err := testserver.Info(addr, "cpu")
		if err != nil {
			return now, err
		}
		for _, of := range []string{"used_cpu_user", "used_cpu_sys"} {
			seconds, err := strconv.ParseFloat(used[of], 64)
			if err != nil {
				return now, err
			}
			now.cpu += time.Duration(seconds * float64(time.Second))
		}
	}
	return now, nil
}

// sent are prefixes of the commands that clients send and scripts do not, because a server
// counts the commands of scripts as well.
var sent = []string{"eval", "subscribe", "unsubscribe", "ssubscribe", "sunsubscribe", "script", "ping", "wait", "client|", "hello"}

// plain are other commands of peers that do not occur in their scripts. The DEL that Redisson
// sends after a release also occurs in its scripts and cannot be counted.
var plain = map[string][]string{"redsync": {"set"}}

// commands returns the number of commands of a peer in the statistics of a server.
func commands(peer string, stats map[string]string) (n int) {
	for key, value := range stats {
		name := strings.TrimPrefix(key, "cmdstat_")
		counts := false
		for _, s := range sent {
			counts = counts || strings.HasPrefix(name, s)
		}
		for _, s := range plain[peer] {
			counts = counts || name == s
		}
		if calls, _, ok := strings.Cut(strings.TrimPrefix(value, "calls="), ","); ok && counts {
			c, _ := strconv.Atoi(calls)
			n += c
		}
	}
	return n
}

// scriptTime returns the time of all scripts in the statistics of a server.
func scriptTime(stats map[string]string) (d time.Duration) {
	for _, name := range []string{"cmdstat_eval", "cmdstat_evalsha"} {
		if _, rest, ok := strings.Cut(stats[name], ",usec="); ok {
			usec, _, _ := strings.Cut(rest, ",")
			n, _ := strconv.Atoi(usec)
			d += time.Duration(n) * time.Microsecond
		}
	}
	return d
}

// look reads the snapshot of a store.
func (d *daemon) look(store string) (now snapshot, err error) {
	if now.cpu, err = timeOf(d.cmd.Process.Pid); err != nil {
		return now, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), daemonTimeout)
	defer cancel()
	switch store {
	case "etcd":
		now.commands, err = etcdMessages(ctx, d.addr)
	case "zookeeper":
		now.commands, err = zookeeperPackets(ctx, d.addr)
	}
	return now, err
}

// timeOf returns the processor time of a process and its children, also of those that have ended.
func timeOf(pid int) (used time.Duration, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	of := fmt.Sprintf("/proc/%d/stat", pid)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		parent, own, waited := parseStat(string(text))
		switch {
		case file == of:
			used += own + waited
		case parent == pid:
			used += own
		}
	}
	return used, nil
}

// parseStat returns the parent of a process, its own processor time, and the time of the children that it has waited for.
func parseStat(text string) (parent int, own, waited time.Duration) {
	const tick = 10 * time.Millisecond // in which Linux counts it for programs
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	number := func(field int) int { // as proc(5) numbers them; the first two are the number and the name
		n, _ := strconv.Atoi(fields[field-3])
		return n
	}
	return number(4), time.Duration(number(14)+number(15)) * tick, time.Duration(number(16)+number(17)) * tick
}

// etcdMessages returns how many messages a server has received from clients: requests, and the messages of their streams.
func etcdMessages(ctx context.Context, addr string) (n int, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	lines := bufio.NewScanner(reply.Body)
	for lines.Scan() {
		if !strings.HasPrefix(lines.Text(), "grpc_server_msg_received_total{") {
			continue
		}
		_, value, _ := strings.Cut(lines.Text(), "} ")
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, err
		}
		n += int(v)
	}
	return n, lines.Err()
}

// zookeeperPackets returns how many requests a server has received, with pings.
func zookeeperPackets(ctx context.Context, addr string) (int, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "srvr"); err != nil {
		return 0, err
	}
	text, err := io.ReadAll(conn)
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "\nReceived: ")
	count, _, _ := strings.Cut(rest, "\n")
	return strconv.Atoi(count)
}
