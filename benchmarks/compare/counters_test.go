package main

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestProcessorTimeOfAProcess(t *testing.T) {
	parent, own, waited := parseStat("12 (a (b) c) S 7 12 12 0 -1 4194560 300 40 0 0 150 50 30 20 20 0 1 0 100")
	assert.Equal(t, 7, parent)
	assert.Equal(t, 2*time.Second, own)
	assert.Equal(t, 500*time.Millisecond, waited)

	// The time of a child counts while it runs, and when it has ended.
	before, err := timeOf(os.Getpid())
	require.NoError(t, err)
	child := exec.Command("sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo; read line")
	in, err := child.StdinPipe()
	require.NoError(t, err)
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	used, err := timeOf(child.Process.Pid)
	require.NoError(t, err)
	require.Positive(t, used)
	running, err := timeOf(os.Getpid())
	require.NoError(t, err)
	assert.GreaterOrEqual(t, running, before+used)
	require.NoError(t, in.Close())
	_ = child.Wait() // there is no line to read
	ended, err := timeOf(os.Getpid())
	require.NoError(t, err)
	assert.GreaterOrEqual(t, ended, before+used)
}
