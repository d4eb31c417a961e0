package machine_test

import (
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestPipe: a reader gets the input of successive writers and no EOF between them; OpenPipe fails without a reader.
func TestPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), machine.SerialInput)
	_, err := machine.OpenPipe(path)
	require.ErrorIs(t, err, errdefs.ErrUnavailable)
	for range 2 { // the second pipe replaces the first
		end, err := machine.MakePipe(path)
		require.NoError(t, err)
		for _, word := range []string{"one", "two"} {
			w, err := machine.OpenPipe(path)
			require.NoError(t, err)
			_, err = w.WriteString(word)
			require.NoError(t, err)
			require.NoError(t, w.Close())
			buf := make([]byte, 16)
			n, err := end.Read(buf)
			require.NoError(t, err)
			require.Equal(t, word, string(buf[:n]))
		}
		require.NoError(t, end.Close())
		_, err = machine.OpenPipe(path)
		require.ErrorIs(t, err, errdefs.ErrUnavailable)
	}
}
