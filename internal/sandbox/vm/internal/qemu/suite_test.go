package qemu

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// TestDriver runs the common suite of all drivers.
func TestDriver(t *testing.T) {
	machinetest.Run(t, subject(t))
}

// subject returns the driver under test; all its drivers share one directory.
func subject(t *testing.T) machinetest.Subject {
	return machinetest.Subject{
		New: driverOver(filepath.Join(t.TempDir(), "qemu")), Guest: machinetest.FindGuest(t, false),
		NewCgroup: machinetest.NewCgroup, UID: 200001, GID: 200002,
	}
}

func driverOver(root string) func(t testing.TB) machine.Driver {
	return func(t testing.TB) machine.Driver {
		d, err := New(Config{Root: root, Virtiofsd: machinetest.FindVirtiofsd(t), Accel: AccelTCG, Opener: machinetest.Taps{},
			Cgroup: machinetest.Cgroups(t), Logger: logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		return d
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
