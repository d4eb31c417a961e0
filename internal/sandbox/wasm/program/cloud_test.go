package program

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// volume returns a mount of a directory.
func volume(t testing.TB, dir, guest string, config bool) workerapi.Mount {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	return workerapi.Mount{Guest: guest, Config: config, Dir: workerapi.File{File: os.NewFile(uintptr(fd), dir)}}
}

// TestCloudPod: a pod sees its environment and the current files of its volumes by wasi:config, and its entries of
// wasi:logging are in the container's log.
func TestCloudPod(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	config, data := t.TempDir(), t.TempDir()
	set := func(dir, name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	require.NoError(t, os.Mkdir(filepath.Join(config, "..1"), 0o755))
	require.NoError(t, os.Symlink("..1", filepath.Join(config, "..data")))
	set(filepath.Join(config, "..1"), "color", "blue")
	set(data, "private", "not a value")
	for _, dir := range []string{config, data} {
		require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // the worker is another user
	}
	u := &socketUser{r.serve("cloud-c", func(s *workerapi.PodSpec) {
		s.Mounts = []workerapi.Mount{volume(t, config, "/etc/app", true), volume(t, data, "/data", false)}
	})}
	require.Equal(t, "200 blue", u.do("/config/color", nil))
	require.Equal(t, "200 the pod", u.do("/config/POD_NAME", nil))
	require.Equal(t, "404 ", u.do("/config/private", nil))
	require.Equal(t, "200 POD_NAME=the pod\ncolor=blue\n", u.do("/config", nil))

	require.NoError(t, os.Mkdir(filepath.Join(config, "..2"), 0o755))
	set(filepath.Join(config, "..2"), "color", "red")
	require.NoError(t, os.Symlink("..2", filepath.Join(config, "..tmp")))
	require.NoError(t, os.Rename(filepath.Join(config, "..tmp"), filepath.Join(config, "..data")))
	require.NoError(t, os.RemoveAll(filepath.Join(config, "..1")))
	require.Equal(t, "200 red", u.do("/config/color", nil))

	require.Equal(t, "200 ", u.do("/log", map[string]string{"X-Level": "4", "X-Context": "orders", "X-Message": "order 7 failed"}))
	require.Equal(t, "level=ERROR msg=\"order 7 failed\" context=orders\n", u.logged("stderr"))
}
