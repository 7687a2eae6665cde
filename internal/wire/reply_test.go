package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPlain(t *testing.T) {
	const script = "Error running script (call to f_00): "
	for text, want := range map[string]string{
		"OOM command not allowed when used memory > 'maxmemory'.": "OOM command not allowed when used memory > 'maxmemory'.",
		"ERR Attempted to access":                                 "Attempted to access",
		"":                                                        "",
		// From Redis 6.2.
		script + "@user_script:10: WRONGTYPE Operation against a key":          "WRONGTYPE Operation against a key",
		script + "@user_script:10: ERR value is not an integer":                "value is not an integer",
		script + "@user_script:1: @user_script: 1: -OOM command not allowed":   "OOM command not allowed",
		script + "@user_script:1: @user_script: 1: Lua script attempted":       "Lua script attempted",
		script + "@user_script:1: user_script:1: attempt to index a nil value": "user_script:1: attempt to index a nil value",
		script + "nothing else":                            script + "nothing else",
		"@user_script: 1: -READONLY You can't write":       "READONLY You can't write", // as a script has caught it
		"@user_script:1":                                   "@user_script:1",
		"about @user_script:1: OOM":                        "about @user_script:1: OOM",
		script + "@user_script:1: @user_script: 1: -ERR x": "x",
	} {
		require.Equal(t, want, plain(text), text)
	}
}

// The reply to every release passes through these.
func TestNoErrorIsNoAllocation(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if IsWrongType(nil) || IsUnknown(nil) {
			t.Fail()
		}
	}))
}
