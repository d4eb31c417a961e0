package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/test/until"
)

// eventually waits until the output of a client command contains, or no longer contains, a text.
func eventually(t *testing.T, c *config.Config, text string, has bool, args ...string) {
	t.Helper()
	until.NoError(t, 30*time.Second, func() error {
		_, out, stderr := tripod(c, "", args...)
		if out += stderr; strings.Contains(out, text) != has {
			return fmt.Errorf("tripod %v: contains %q is %t, want %t: %s", args, text, !has, has, out)
		}
		return nil
	})
}

// TestN11EdgeStoreIsDamaged: while the edge's files are unusable, the node serves, reports it and leaves them
// untouched; once they are repaired, it opens the edge without a restart.
func TestN11EdgeStoreIsDamaged(t *testing.T) {
	for _, name := range []string{"broker.db", "manager.db", "identity.json"} {
		t.Run(name, func(t *testing.T) {
			c := fakeNode(t)
			c.Edge.Enabled, c.Edge.Broker, c.Broker.Address = true, config.EmbeddedBroker, freeAddress(t)
			c.Edge.Wasm.Enabled = false
			if err := start(t, c)(); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(c.Root, "edge", name)
			right, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(file, 0); err != nil {
				t.Fatal(err)
			}
			stop := startUntil(t, c, "ps")
			eventually(t, c, "EdgeReady", true, "info")
			eventually(t, c, name, true, "info")
			must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir())
			if now, err := os.ReadFile(file); err != nil || len(now) != 0 {
				t.Errorf("the damaged file was changed: %d bytes, %v", len(now), err)
			}
			if err := os.WriteFile(file, right, 0o600); err != nil {
				t.Fatal(err)
			}
			eventually(t, c, "EdgeReady", false, "info")
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestN11OrchestratorRecordIsNotWhole: an orchestrator does not mistake an empty record for a realm without modules.
func TestN11OrchestratorRecordIsNotWhole(t *testing.T) {
	file, _ := orchestratorFile(t)
	s := orchestratorSettings{file: file, embed: true, root: filepath.Join(t.TempDir(), "o")}
	c, err := s.load()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(c.Orchestrator.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"empty": "", "foreign": strings.Repeat("not a database\n", 1000)} {
		record := filepath.Join(c.Orchestrator.Root, "record.db")
		if err := os.WriteFile(record, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		err := runOrchestrator(ctx, c, quiet)
		cancel()
		if !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("a record that is %s: the orchestrator ended with %v, want a refusal", name, err)
		}
		if now, err := os.ReadFile(record); err != nil || string(now) != content {
			t.Errorf("%s: the record was changed, %v", name, err)
		}
	}
}

// TestN5FreshNodeOnReadOnlyRoot: a node that never had a record also starts, and creates the record once it can.
func TestN5FreshNodeOnReadOnlyRoot(t *testing.T) {
	c := fakeNode(t)
	if err := os.MkdirAll(c.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(c.Root, c.Root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	mounted := true
	unmount := func() {
		if mounted {
			_ = unix.Unmount(c.Root, unix.MNT_DETACH)
		}
		mounted = false
	}
	t.Cleanup(unmount)
	if err := unix.Mount("", c.Root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	stop := startUntil(t, c, "ps")
	eventually(t, c, "DiskNotWritable", true, "info")
	unmount()
	eventually(t, c, "DiskNotWritable", false, "info")
	must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir())
	if err := stop(); err != nil {
		t.Error(err)
	}
	record, err := store.Open(recordFile(c))
	if err != nil || record.Fresh() {
		t.Fatalf("the record: %v", err)
	}
	if err := record.Close(); err != nil {
		t.Error(err)
	}
}
