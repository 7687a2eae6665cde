package main

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redlatch/redlatch/internal/testserver"
)

// machine describes the machine of the measurements.
type machine struct {
	CPU      string  `json:"cpu"`
	Cores    int     `json:"cores"`
	Kernel   string  `json:"kernel"`
	MemoryGB float64 `json:"memoryGB"`
}

func thisMachine() machine {
	m := machine{CPU: field("/proc/cpuinfo", "model name"), Cores: runtime.NumCPU()}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		version, _, _ := strings.Cut(unix.ByteSliceToString(name.Release[:]), "-") // without the name of the build
		m.Kernel = unix.ByteSliceToString(name.Sysname[:]) + " " + version
	}
	kB, _ := strconv.ParseFloat(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"), 64)
	m.MemoryGB = math.Round(kB/(1<<20)*10) / 10
	return m
}

// field returns the first value of that name in a file of lines "name: value".
func field(file, name string) string {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// version is the version of a measured program or library.
type version struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// libraries are the modules whose versions the report lists.
var libraries = []string{
	"github.com/redis/rueidis", "github.com/redis/go-redis/v9",
	"github.com/go-redsync/redsync/v4", "github.com/bsm/redislock", "github.com/go-redis/redis_rate/v10", "golang.org/x/time", "go.etcd.io/etcd/client/v3",
	"github.com/go-zookeeper/zk", "github.com/jackc/pgx/v5", "github.com/go-sql-driver/mysql",
}

// programs print their version.
var programs = []struct {
	name, store, pattern, arg string
}{
	{"etcd", "etcd", etcdServer, "--version"},
	{"PostgreSQL", "postgres", "/usr/lib/postgresql/*/bin/postgres", "--version"},
	{"MariaDB", "mariadb", "mariadbd", "--version"},
	{"Java", "zookeeper", "java", "-version"},
}

// versions returns those of the libraries and of the started servers.
func versions(s *services) []version {
	all := []version{{"Go", strings.TrimPrefix(runtime.Version(), "go")}}
	if len(s.redis) > 0 {
		if info, err := testserver.Info(s.redis[0].Addr, "server"); err == nil {
			all = append(all, version{"redis-server", info["redis_version"]})
		}
	}
	for _, p := range programs {
		path, err := find(p.pattern)
		if s.others[p.store] == nil || err != nil {
			continue
		}
		if out, err := exec.Command(path, p.arg).CombinedOutput(); err == nil {
			all = append(all, version{p.name, firstVersion(string(out))})
		}
	}
	if path, err := find(zookeeperServer); s.others["zookeeper"] != nil && err == nil {
		all = append(all, inNames("ZooKeeper", filepath.Join(filepath.Dir(path), "..", zookeeperServer, "usr/share/java/zookeeper-[0-9]*.jar"))...)
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if slices.Contains(libraries, m.Path) {
				all = append(all, version{m.Path, m.Version})
			}
		}
	}
	for _, of := range []struct{ name, peer, jar string }{
		{"org.redisson:redisson", redisson, "redisson"},
		{"org.apache.curator:curator-recipes", curator, "curator-recipes"},
		{"org.apache.zookeeper:zookeeper", curator, "zookeeper"},
	} {
		all = append(all, inNames(of.name, jars(of.peer, of.jar+"-[0-9]*.jar"))...)
	}
	return all
}

var versionNumber = regexp.MustCompile(`\d+(\.\d+)+`)

func firstVersion(text string) string { return versionNumber.FindString(text) }

// inNames returns the versions in the names of files.
func inNames(name, pattern string) (all []version) {
	files, _ := filepath.Glob(pattern)
	for _, file := range files {
		all = append(all, version{name, firstVersion(filepath.Base(file))})
	}
	return all
}

// noise describes the other load of the machine.
type noise struct {
	// Load is the load average of the minute before.
	Load float64 `json:"load"`
	// Steal is the share of time that the machine's host took, in percent.
	Steal float64 `json:"steal"`
	// Floor is the rate of the floor with one goroutine, before each scenario and at the end.
	Floor figure `json:"floor"`
}

// loadAverage returns that of the last minute.
func loadAverage() float64 {
	text, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(text), " ")
	load, _ := strconv.ParseFloat(first, 64)
	return load
}

// ticks are times of all processors since the machine was started.
type ticks struct{ all, stolen float64 }

// processorTicks reads the summary line of /proc/stat.
func processorTicks() (t ticks) {
	text, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(text), "\n")
	return parseTicks(line)
}

func parseTicks(line string) (t ticks) {
	const stolen, guest = 7, 8 // guest time is part of the other fields
	for i, word := range strings.Fields(strings.TrimPrefix(line, "cpu ")) {
		v, _ := strconv.ParseFloat(word, 64)
		if i < guest {
			t.all += v
		}
		if i == stolen {
			t.stolen = v
		}
	}
	return t
}

// stealSince returns the share of stolen time, in percent.
func (t ticks) stealSince(before ticks) float64 {
	return 100 * (t.stolen - before.stolen) / max(t.all-before.all, 1)
}
