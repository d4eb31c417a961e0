package broker

import (
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// wait waits until all urgent changes are on the disk, or writing them has failed.
func (s *store) wait() { s.waitFor(s.needed()) }

func contents(t *testing.T, s *store) map[string]string {
	all := map[string]string{}
	require.NoError(t, s.each("", func(k string, v []byte) error {
		all[k] = string(v)
		return nil
	}))
	return all
}

func TestStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "store.db")
	log := slog.New(slog.DiscardHandler)
	s, err := openStore(path, log)
	require.NoError(t, err)
	s.put("a1", []byte("x"), true)
	s.wait()
	assert.Equal(t, map[string]string{"a1": "x"}, contents(t, s), "what is urgent is there after wait")

	s.put("a2", []byte("y"), false)
	s.del("a2", false)
	s.mu.Lock()
	assert.Empty(t, s.dirty, "a key that was set and removed within a batch never reaches the disk")
	s.mu.Unlock()
	s.del("a1", false)
	s.put("a1", []byte("z"), false)
	s.put("b1", []byte("late"), false)
	require.NoError(t, s.close(), "writes what is left")

	s, err = openStore(path, log)
	require.NoError(t, err)
	assert.Equal(t, map[string]string{"a1": "z", "b1": "late"}, contents(t, s))
	_, err = openStore(path, log)
	require.ErrorIs(t, err, errdefs.ErrUnavailable, "one at a time")
	s.del("a1", true)
	s.wait()
	assert.Equal(t, map[string]string{"b1": "late"}, contents(t, s))

	require.NoError(t, s.db.Close()) // as a disk that fails
	s.put("c", []byte("v"), true)
	s.wait() // does not hang
	assert.NotZero(t, s.errors.Load())
	s.mu.Lock()
	assert.Equal(t, []byte("v"), s.dirty["c"], "kept for the next attempt")
	s.mu.Unlock()
	require.NoError(t, s.close())
}

// TestStoreFull: what comes and goes while nothing can be written leaves nothing behind, and the rest is written later.
func TestStoreFull(t *testing.T) {
	s, err := openStore(filepath.Join(t.TempDir(), "store.db"), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.close()) })
	s.put("removed", []byte{}, true)
	s.put("changed", []byte("x"), true)
	s.wait()
	s.db.MaxSize = 64 << 10
	large := make([]byte, 1<<20)
	s.put("large", large, true)
	s.put("came", large, true)
	s.wait()
	require.NotZero(t, s.errors.Load())
	s.del("came", true)
	s.del("removed", true)
	s.put("changed", []byte("y"), true)
	s.wait()
	s.mu.Lock()
	assert.NotContains(t, s.disk, "came")
	assert.NotContains(t, s.dirty, "came", "it never reached the disk")
	assert.Contains(t, s.dirty, "removed")
	s.db.MaxSize = 0
	s.mu.Unlock()
	s.put("last", []byte("z"), true)
	s.wait()
	assert.Equal(t, map[string]string{"changed": "y", "large": string(large), "last": "z"}, contents(t, s))
}

func TestStoreInMemory(t *testing.T) {
	s, err := openStore("", slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	s.put("a", []byte("x"), true)
	s.wait()
	assert.Empty(t, contents(t, s))
	require.NoError(t, s.close())
}

func TestCovers(t *testing.T) {
	for _, test := range []struct {
		allowed, asked string
		want           bool
	}{
		{"#", "a/b", true}, {"#", "#", true}, {"#", "+/a", true}, {"#", "$SYS/x", false}, {"$SYS/#", "$SYS/x", true}, {"+/x", "$SYS/x", false},
		{"a/#", "a", true}, {"a/#", "a/b/c", true}, {"a/#", "a/#", true}, {"a/#", "a/+/c", true}, {"a/#", "ab", false}, {"a/#", "b/#", false},
		{"a/+", "a/b", true}, {"a/+", "a/+", true}, {"a/+", "a/#", false}, {"a/+", "a/b/c", false}, {"a/+", "a", false}, {"+/+", "a/b", true},
		{"a/b", "a/b", true}, {"a/b", "a/+", false}, {"a/b", "a/b/c", false}, {"a/b", "a", false}, {"a/+/#", "a/b", true}, {"a/+/#", "a", false},
		{"a//b", "a//b", true}, {"a/+/b", "a//b", true},
	} {
		assert.Equal(t, test.want, covers(test.allowed, test.asked), "%s covers %s", test.allowed, test.asked)
	}
	u, err := newUsers([]User{{Name: "a+b", Read: []string{"x/%u", "y/#"}}})
	require.NoError(t, err)
	assert.False(t, u.allowed("a+b", "c", "x/a+b", false), "a name with a wildcard opens nothing")
	assert.True(t, u.allowed("a+b", "c", "$share/group/y/1", false))
	assert.False(t, u.allowed("a+b", "c", "$share/group/x/1", false))
	assert.False(t, u.allowed("nobody", "c", "y/1", false))
}
