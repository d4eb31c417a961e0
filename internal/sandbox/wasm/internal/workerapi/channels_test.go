package workerapi

import (
	"fmt"
	"io"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
)

func TestChannelsGetAConnectionOfTheirOwn(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	conn, err := c.Channels(t.Context(), "pod")
	require.NoError(t, err)
	defer conn.Close()
	said, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, "channels of pod", string(said))
}

func TestChannelsRefused(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	h.fail(fmt.Errorf("pod: %w", errdefs.ErrNotFound))
	before := openFiles(t)
	_, err := c.Channels(t.Context(), "pod")
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.Equal(t, before, openFiles(t))
}
