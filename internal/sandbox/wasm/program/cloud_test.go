package program

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// store lets the guest use wasi:keyvalue.
func (u *socketUser) store(op, key, value string, headers ...string) string {
	u.rig.t.Helper()
	all := map[string]string{"X-Op": op, "X-Key": key, "X-Value": value}
	for i := 0; i < len(headers); i += 2 {
		all[headers[i]] = headers[i+1]
	}
	return u.do("/kv", all)
}

// redis starts Debian's redis-server in the world and returns its address.
func (w *world) redis(args ...string) string {
	w.t.Helper()
	l, err := net.Listen("tcp", worldIP+":0")
	require.NoError(w.t, err)
	at := l.Addr().(*net.TCPAddr)
	l.Close()
	c := exec.Command("redis-server",
		append([]string{"--bind", worldIP, "--port", fmt.Sprint(at.Port), "--protected-mode", "no", "--save", "", "--dir", w.t.TempDir()},
			args...)...)
	require.NoError(w.t, c.Start(), "hack/setup.sh installs redis-server")
	w.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	eventually(w.t, "redis-server listens", func() bool {
		conn, err := net.Dial("tcp", at.String())
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return at.String()
}

// TestStoreOfAPod: pods share a store through their network namespaces, as far as their rules allow it.
func TestStoreOfAPod(t *testing.T) {
	w := newWorld(t)
	server := w.redis("--requirepass", "secret")
	url := func(text string) func(*workerapi.PodSpec) {
		return func(s *workerapi.PodSpec) { s.KeyValue = text }
	}
	user := func(rules, text string) *socketUser { return &socketUser{w.caller("cloud-c", rules, url(text)).pod} }
	a, b := user("*", "redis://:secret@"+server), user(server, "redis://:secret@"+server)
	require.Equal(t, "200 ", a.store("set", "../k", "v"))
	require.Equal(t, "200 v", b.store("get", "../k", ""))
	require.Equal(t, "404 ", b.store("get", "missing", ""))
	require.Equal(t, "200 yes", b.store("exists", "../k", ""))
	require.Equal(t, "200 3", a.store("increment", "n", "3"))
	require.Equal(t, "200 m=x\nm2=x\nm3 is missing\n", a.store("many", "m", "x"))
	require.Equal(t, "200 ", b.store("delete", "../k", ""))
	require.Equal(t, []string{"", "m", "m2", "n"}, slices.Sorted(strings.SplitSeq(strings.TrimPrefix(a.store("keys", "", ""), "200 "), "\n")))
	require.Equal(t, "502 no-such-store", a.store("get", "k", "", "X-Store", "others"))

	const each = 20
	var all sync.WaitGroup
	for _, u := range []*socketUser{a, b} {
		for range 2 {
			all.Go(func() {
				for range each {
					if got := u.store("append", "text", "x"); got != "200 " {
						t.Errorf("append: %s", got)
					}
					if got := u.store("increment", "sum", "1"); !strings.HasPrefix(got, "200 ") {
						t.Errorf("increment: %s", got)
					}
				}
			})
		}
	}
	all.Wait()
	require.Equal(t, "200 "+strings.Repeat("x", 4*each), a.store("get", "text", ""))
	require.Equal(t, fmt.Sprint("200 ", 4*each), b.store("get", "sum", ""))

	part := user("*", "redis://:secret@"+server+"/0?prefix=m")
	require.Equal(t, "200 x", part.store("get", "2", ""))
	require.Equal(t, "404 ", part.store("get", "sum", ""))

	require.Equal(t, "502 access-denied", user("*", "redis://:wrong@"+server).store("get", "k", ""))
	require.Equal(t, "502 access-denied", user("10.9.9.9", "redis://:secret@"+server).store("get", "k", ""))
	require.Regexp(t, "^502 .+", user("*", "redis://"+worldIP+":1").store("get", "k", ""))
	require.Equal(t, "502 no-such-store", user("*", "").store("get", "k", ""))
	alone := &socketUser{w.serve("cloud-c", url("redis://:secret@"+server))} // a pod without egress
	require.Equal(t, "502 access-denied", alone.store("get", "k", ""))
}
