package keys_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/keys"
)

// TestValue checks that what an earlier version has written is read, and that the present key comes first.
func TestValue(t *testing.T) {
	require.Equal(t, "tripod.run/owner", keys.Former(keys.Owner))
	require.Empty(t, keys.Value(nil, keys.Owner))
	old := map[string]string{"tripod.run/owner": "old"}
	require.Equal(t, "old", keys.Value(old, keys.Owner))
	old[keys.Owner] = ""
	require.Empty(t, keys.Value(old, keys.Owner), "the present key comes first, even if it is empty")
}
