package main

import (
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

type discarded struct{ io.Writer }

func (discarded) Close() error { return nil }

func TestAWorkerServesItsPeerAgain(t *testing.T) {
	of := map[string]*process{}
	var c crew
	for _, peer := range []string{redisson, curator} {
		of[peer] = &process{peer: peer, in: discarded{io.Discard}}
		c.idle = append(c.idle, of[peer])
	}
	p, err := c.start(task{Peer: curator})
	require.NoError(t, err)
	assert.Same(t, of[curator], p)
	assert.Equal(t, []*process{of[redisson]}, c.idle)
}

func TestAPeerInJavaHasToBeBuilt(t *testing.T) {
	t.Chdir(t.TempDir())
	_, err := launch(curator)
	require.ErrorIs(t, err, errMissing)
	assert.ErrorContains(t, err, "mvn -f interop/curator compile")
}
