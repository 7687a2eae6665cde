//go:build unix

package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
)

// Signal sends a signal to the process, unless it has ended. After SIGSTOP it blocks until every
// thread has stopped.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(p.t, err)
	}
	if sig == syscall.SIGSTOP {
		Eventually(p.t, 10*time.Second, "the process has stopped", p.stopped)
	}
}

// stopped reports whether all threads of the process have stopped.
func (p *Process) stopped() bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		// "<id> (<name>) <state> ...": T is stopped, Z is a zombie.
		_, state, _ := strings.Cut(string(stat), ") ")
		if err == nil && !strings.HasPrefix(state, "T") && !strings.HasPrefix(state, "Z") {
			return false
		}
	}
	return true
}
