package loglimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLimiter checks that each kind of event has its own limit, and that a line has the events since the last one.
func TestLimiter(t *testing.T) {
	l, now := Limiter[string]{Every: time.Second}, time.Now()
	require.Equal(t, 1, l.Add("a", 1, now))
	require.Zero(t, l.Add("a", 2, now))
	require.Equal(t, 3, l.Add("b", 3, now))
	require.Zero(t, l.Add("a", 4, now.Add(time.Second/2)))
	require.Equal(t, 11, l.Add("a", 5, now.Add(time.Second)))
	require.Zero(t, l.Add("a", 6, now.Add(time.Second)))
	require.Equal(t, map[string]int{"a": 6}, l.Rest())
	require.Empty(t, l.Rest())
}

// TestLimiterIsBounded checks that many kinds of events neither take much memory nor stop the lines for long.
func TestLimiterIsBounded(t *testing.T) {
	l, now := Limiter[string]{Every: time.Second}, time.Now()
	lines := 0
	for i := range 2 * most {
		lines += l.Add(fmt.Sprint(i), 1, now)
	}
	require.Equal(t, most, lines)
	require.Len(t, l.lines, most)
	require.Equal(t, 1, l.Add("later", 1, now.Add(time.Second)))
}
