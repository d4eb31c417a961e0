package code

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRefusalsAreForgotten checks that a component which the compiler has refused is tried again, but only later. Other failures
// say nothing about the component.
func TestRefusalsAreForgotten(t *testing.T) {
	refused, crashed := refuse("unknown import"), errors.New("the compiler failed")
	c := Cache{failed: map[string]failure{
		"new":     {err: refused, at: time.Now()},
		"old":     {err: refused, at: time.Now().Add(-failureMemory)},
		"crashed": {err: crashed, at: time.Now()},
	}}
	require.Equal(t, refused, c.refused("new"))
	require.NoError(t, c.refused("old"))
	require.NoError(t, c.refused("crashed"))
	require.NoError(t, c.refused("unknown"))
}
