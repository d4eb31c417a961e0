package code

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/guard"
)

// TestQueueOrder checks that the most urgent compilation runs next, that pods wait for no others, and that a raised
// priority counts.
func TestQueueOrder(t *testing.T) {
	q := newQueue(1)
	background, later, pull := q.enter(PriorityBackground), q.enter(PriorityBackground), q.enter(PriorityPull)
	runs := func(t *ticket) bool { return guard.IsClosed(t.admitted) }
	require.True(t, runs(background), "the first runs at once")
	require.False(t, runs(later) || runs(pull), "the others wait")
	pod, second := q.enter(priorityPod), q.enter(priorityPod)
	require.True(t, runs(pod), "a pod does not wait for the background")
	require.False(t, runs(second), "a pod waits for another pod")
	queued, running := q.lengths()
	require.Equal(t, [3]int{1, 1, 1}, queued)
	require.Equal(t, [3]int{1, 0, 1}, running)
	background.leave()
	require.False(t, runs(second) || runs(pull), "the limit counts compilations for pods")
	pod.leave()
	require.True(t, runs(second))
	require.False(t, runs(pull))
	second.leave()
	require.True(t, runs(pull), "a pull comes before the background")
	later.raise(priorityPod)
	require.True(t, runs(later), "a pod joined it")
	later.raise(PriorityBackground)
	require.Equal(t, priorityPod, later.priority)
	canceled := q.enter(priorityPod)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, canceled.wait(ctx), context.Canceled)
	canceled.leave()
	later.leave()
	pull.leave()
	queued, running = q.lengths()
	require.Zero(t, queued)
	require.Zero(t, running)
}
