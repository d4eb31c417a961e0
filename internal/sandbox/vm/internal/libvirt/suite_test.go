package libvirt

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
)

func TestMain(m *testing.M) {
	if raw := os.Getenv(victimEnv); raw != "" {
		var v victim
		if err := errors.Join(json.Unmarshal([]byte(raw), &v), v.live()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	machinetest.Main(m)
}

// TestDriver runs the common suite of all drivers with a real libvirtd.
func TestDriver(t *testing.T) {
	machinetest.Run(t, newRig(t).subject(t))
}

// rig is a libvirtd and the common configuration of drivers for it.
type rig struct {
	*libvirtdtest.Daemon
	cfg Config
}

func newRig(t testing.TB) rig {
	dir := publicTemp(t)
	return rig{libvirtdtest.Start(t),
		Config{Dir: filepath.Join(dir, "run"), Owner: dir, Wrapper: libvirtdtest.Wrapper(t), Virtiofsd: machinetest.FindVirtiofsd(t),
			Accel: qemu.AccelTCG, Opener: machinetest.Taps{}, Cgroup: machinetest.Cgroups(t)}}
}

// publicTemp returns a directory that every user can enter.
func publicTemp(t testing.TB) string {
	dir := t.TempDir()
	for at := dir; at != "/"; at = filepath.Dir(at) {
		if checkReachable(at) == nil {
			break
		}
		require.NoError(t, os.Chmod(at, 0o755))
	}
	return dir
}

// driver makes a driver for the rig's libvirtd. The caller closes it.
func (r rig) driver(t testing.TB) *Driver {
	cfg := r.cfg
	cfg.URI, cfg.Logger = r.URI, logger(t)
	d, err := New(cfg)
	require.NoError(t, err)
	return d
}

func (r rig) subject(t testing.TB) machinetest.Subject {
	return machinetest.Subject{
		New:   func(t testing.TB) machine.Driver { return r.driver(t) },
		Guest: machinetest.FindGuest(t, false), NewCgroup: machinetest.NewCgroup, UID: 200001, GID: 200002,
	}
}

func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct{ testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}
