package engine

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// A process may have many claims. Beyond this size one takes a larger piece of memory.
func TestClaimIsSmall(t *testing.T) { require.LessOrEqual(t, unsafe.Sizeof(claim{}), uintptr(576)) }
