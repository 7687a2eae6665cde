package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestExamples runs every example as a user would, on a real server and on the embedded one.
func TestExamples(t *testing.T) {
	bin := t.TempDir()
	out, err := exec.Command("go", "build", "-o", bin+string(filepath.Separator), "./...").CombinedOutput()
	require.NoError(t, err, "%s", out)
	wants := map[string][]string{
		"quickstart":  {"killed during its increment", "Exact."},
		"do":          {"done"},
		"boundedwait": {"still busy", "printing"},
		"reentry":     {"booking -100, holding the account 2 times", "booking +40, holding the account 2 times"},
		"fencing":     {"stale fencing token: 1, after 2 was seen", `the file says "second"`},
		"cache":       {"20 requests, built 1 time(s)"},
		"fair":        {"worker 1 prints\nworker 2 prints\nworker 3 prints\n"},
		"fanin":       {", 3 left\n", ", 0 left\n", "all parts are done: 1 4 9 16\n"},
		"catalogue":   {"10 readers at the same time", "wrote 25, reads 25", "wrote 30, reads 30"},
		"workerpool":  {"killed: 1 of 3 permits are free", "96 jobs are done, 3 at once at most", "3 of 3 permits are free again"},
		"transfer":    {"200 transfers between 3 accounts, total 300"},
		"quorum":      {"with 3 of 3 servers: locked", "with 2 of 3 servers: locked", "with 1 of 3 servers: not acquired"},
		"trace":       {"process 1", "process 2", "contended=true", "woken by message", "redlatch.release"},
	}
	programs, err := os.ReadDir(bin)
	require.NoError(t, err)
	require.Len(t, programs, len(wants))
	for name, want := range wants {
		for server, path := range map[string]string{"real": os.Getenv("PATH"), "embedded": "/nowhere"} {
			t.Run(name+"/"+server, func(t *testing.T) {
				t.Parallel()
				cmd := exec.CommandContext(t.Context(), filepath.Join(bin, name))
				cmd.WaitDelay = time.Second
				cmd.Env = append(os.Environ(), "PATH="+path, "REDIS_URL=")
				if name == "do" && server == "real" {
					cmd.Env = append(cmd.Env, "GODEBUG=fips140=only")
				}
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s", out)
				for _, w := range want {
					require.Contains(t, string(out), w)
				}
				if name == "quickstart" {
					require.Equal(t, server == "embedded", strings.Contains(string(out), "embedded server"))
				}
			})
		}
	}
}
