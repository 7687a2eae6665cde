package main

import (
	"encoding/json"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRelease of scripts/release checks the version of a program that was built from a release.
func TestVersion(t *testing.T) {
	platform := runtime.GOOS + "/" + runtime.GOARCH
	require.Regexp(t, `^redlatch \S+ \S+ `+runtime.Version()+" "+platform+"\n$", succeeds(t, unreachable, "version"))
	var b map[string]string
	require.NoError(t, json.Unmarshal([]byte(succeeds(t, unreachable, "version", "--json")), &b))
	require.NotEmpty(t, b["version"])
	require.Equal(t, runtime.Version(), b["go"])
	require.Equal(t, platform, b["platform"])
	require.Regexp(t, `^redlatch version \S+\n$`, succeeds(t, unreachable, "--version"))
	fails(t, unreachable, statusFailed, "too many arguments", "version", "now")
}
