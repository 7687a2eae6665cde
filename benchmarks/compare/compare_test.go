package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	workIfAsked() // workers are this program, started again
	os.Exit(m.Run())
}

// small is a short comparison of the peers that need only Redis and Go.
func small() []scenario {
	elsewhere := append([]string{redisson}, otherPeers...)
	all := scenarios(100 * time.Millisecond)
	for i := range all {
		if all[i].number < 5 {
			all[i].cells = all[i].cells[:min(len(all[i].cells), 2)]
		}
		all[i].cells = slices.DeleteFunc(all[i].cells, func(c cell) bool { return c.rival != "" && slices.Contains(elsewhere, c.rival) })
		for j := range all[i].cells {
			c := &all[i].cells[j]
			c.times = min(c.times, 1)
			c.peers = slices.DeleteFunc(slices.Clone(c.peers), func(peer string) bool { return slices.Contains(elsewhere, peer) })
			switch t := &c.task; {
			case t.Do == "hold", t.Do == "wait":
				t.Goroutines, t.For = 100, 300*time.Millisecond
			case t.Kind == "red": // several goroutines may keep each other from a majority for that long
				t.Goroutines = 1
			}
		}
	}
	return all
}

func TestEverythingIsMeasured(t *testing.T) {
	t.Parallel()
	p := plan{scenarios: small(), repetitions: 1, pulse: 100 * time.Millisecond, progress: io.Discard}
	r, err := compare(p)
	require.NoError(t, err)
	for _, s := range r.Scenarios {
		for _, c := range s.Cells {
			for _, row := range c.Rows {
				assert.NotEmpty(t, row.Figures, "%s, %s, %s: %s", s.Title, c.Name, row.Peer, row.Failure)
				if row.Peer == us {
					assert.Empty(t, row.Failure, c.Name)
				}
			}
		}
	}
	assert.Len(t, r.Noise.Floor, len(p.scenarios)+1)

	dir := t.TempDir()
	require.NoError(t, r.write(filepath.Join(dir, figuresFile)))
	require.NoError(t, r.writeReport(dir))
	for _, c := range r.charts() {
		assert.FileExists(t, filepath.Join(dir, c.file))
	}
	text, err := os.ReadFile(filepath.Join(dir, reportFile))
	require.NoError(t, err)
	host, err := os.Hostname()
	require.NoError(t, err)
	assert.NotContains(t, string(text), " "+host+" ")
	again, err := read(filepath.Join(dir, figuresFile))
	require.NoError(t, err)
	assert.Equal(t, string(text), again.text(again.charts()), "the report can be rewritten from the figures")
}

func TestAPeerThatFailsIsARow(t *testing.T) {
	t.Parallel()
	s := scenario{measures: []string{"rate"}, best: "rate", cells: []cell{{
		name: "c", processes: 2, peers: []string{"nobody", us}, task: task{Do: "repeat", Kind: "lock", Goroutines: 2, For: 50 * time.Millisecond},
	}}}
	r, err := compare(plan{scenarios: []scenario{s}, repetitions: 2, pulse: 50 * time.Millisecond, progress: io.Discard})
	require.NoError(t, err)
	rows := r.Scenarios[0].Cells[0].Rows
	assert.Contains(t, rows[0].Failure, `unknown peer "nobody"`)
	assert.Equal(t, 1, rows[0].Failed, "not tried again")
	assert.Len(t, rows[1].Figures["rate"], 2)
}

func TestCommandsOfScriptsAreNotCounted(t *testing.T) {
	stats := map[string]string{
		"cmdstat_evalsha": "calls=10,usec=1", "cmdstat_hset": "calls=10,usec=1", "cmdstat_set": "calls=5,usec=1",
		"cmdstat_info": "calls=2,usec=1", "cmdstat_client|setinfo": "calls=1,usec=1",
	}
	assert.Equal(t, 11, commands(us, stats))
	assert.Equal(t, 16, commands("redsync", stats))
	stats["cmdstat_eval"] = "calls=1,usec=7,usec_per_call=7.00"
	assert.Equal(t, 8*time.Microsecond, scriptTime(stats))
}
