package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScriptErrors(t *testing.T) {
	for _, tt := range []struct {
		text, reason string
		want         bool
	}{
		{"OOM command not allowed when used memory > 'maxmemory'.", "OOM", true},
		{"max number of clients reached", "max number of clients", true},
		{"something about OOM", "OOM", false},
		// From Redis 6.2.
		{"Error running script (call to f_00): @user_script:10: WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE", true},
		{"Error running script (call to f_00): @user_script:1: @user_script: 1: -OOM command not allowed when used memory > 'maxmemory'.", "OOM", true},
		{"Error running script (call to f_00): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.", "OOM", false},
	} {
		require.Equal(t, tt.want, says(tt.text, tt.reason), tt.text)
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
