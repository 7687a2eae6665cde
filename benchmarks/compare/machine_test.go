package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSteal(t *testing.T) {
	before := parseTicks("cpu  100 0 100 700 0 0 0 100 50 0")
	assert.Equal(t, ticks{all: 1000, stolen: 100}, before, "guest time is not counted twice")
	after := parseTicks("cpu  200 0 200 1300 0 0 0 300 50 0")
	assert.InDelta(t, 20, after.stealSince(before), 1e-9)
	assert.Zero(t, before.stealSince(before))
}

func TestThisMachine(t *testing.T) {
	m := thisMachine()
	assert.NotZero(t, m.Cores)
	assert.NotZero(t, m.MemoryGB)
	assert.Contains(t, m.Kernel, "Linux")
}

func TestFirstVersion(t *testing.T) {
	assert.Equal(t, "3.4.23", firstVersion("etcd Version: 3.4.23\nGit SHA: 1"))
	assert.Equal(t, "17.0.15", firstVersion(`openjdk version "17.0.15" 2025-04-15`))
	assert.Empty(t, firstVersion("none"))
}
