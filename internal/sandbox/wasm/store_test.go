package wasm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/pairs"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestStoreURL checks where the address of the store comes from, and that no error shows it.
func TestStoreURL(t *testing.T) {
	b := &Backend{}
	b.cfg.LabelPrefix = "p/"
	user := workerapi.Loaded{Imports: []string{"wasi:keyvalue/store@0.2.0-draft#open"}}
	env := []string{"GOOD=redis://:secret@redis", "BAD=http://secret@redis"}
	for _, c := range []struct {
		annotation, want, words string
		loaded                  workerapi.Loaded
	}{
		{"", "", "", user},
		{"redis://redis:1/2", "redis://redis:1/2", "", user},
		{"$(GOOD)", "redis://:secret@redis", "", user},
		{"$(BAD)", "", "annotation p/keyvalue: the variable BAD: not a URL", user},
		{"$(MISSING)", "", "the container has no variable MISSING", user},
		{"$(MISSING)", "", "", workerapi.Loaded{Imports: []string{"wasi:io/poll@0.2.0#poll"}}},
		{"http://secret@redis", "", "the scheme is neither redis nor rediss", user},
		{"redis://$(GOOD)", "", "", workerapi.Loaded{}},
	} {
		pod := &runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/keyvalue": c.annotation}}
		o, err := annotations.Parse(pod, "c", "p/")
		got := ""
		if err == nil {
			spec := workerapi.PodSpec{Env: env}
			err = b.openStore(o, nil, c.loaded, &spec)
			got = spec.KeyValue
		}
		if got != c.want || (err == nil) != (c.words == "") {
			t.Errorf("annotation %q: %q, %v; want %q, %q", c.annotation, got, err, c.want, c.words)
		}
		if err != nil && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("annotation %q: %v, want ErrInvalidArgument with %q", c.annotation, err, c.words)
		}
	}
}

// TestStoreOfNode checks which pods get the node's store, whose directory belongs to the workers' user, and that the stores
// are listed and removed.
func TestStoreOfNode(t *testing.T) {
	root := t.TempDir()
	b := &Backend{}
	b.cfg.LabelPrefix, b.cfg.Root, b.cfg.UID, b.cfg.GID, b.cfg.Pairs = "p/", root, os.Getuid(), os.Getgid(), Pairs{Bytes: 1000, Keys: 10}
	user := workerapi.Loaded{Imports: []string{"wasi:keyvalue/store@0.2.0-draft#open"}}
	open := func(namespace string, loaded workerapi.Loaded) (*workerapi.NodeStore, error) {
		config := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Namespace: namespace},
			Annotations: map[string]string{"p/keyvalue": "node"}}
		o, err := annotations.Parse(config, "c", "p/")
		if err != nil {
			t.Fatal(err)
		}
		spec := workerapi.PodSpec{}
		err = b.openStore(o, &sandbox.Pod{Config: config}, loaded, &spec)
		t.Cleanup(spec.CloseFiles)
		return spec.NodeStore, err
	}
	for _, namespace := range []string{"", "..", ".", "a/b", "../a", "A", "a.b", "-a", strings.Repeat("a", 64)} {
		if _, err := open(namespace, user); !errdefs.IsInvalidArgument(err) ||
			!strings.Contains(err.Error(), "annotation p/keyvalue: the namespace") {
			t.Errorf("namespace %q: %v", namespace, err)
		}
		if err := RemoveStore(t.Context(), root, namespace); !errdefs.IsInvalidArgument(err) {
			t.Errorf("RemoveStore(%q): %v", namespace, err)
		}
	}
	if n, err := open("shop", workerapi.Loaded{}); n != nil || err != nil {
		t.Errorf("a component that uses no store: %v, %v", n, err)
	}
	for range 2 {
		n, err := open("shop", user)
		if err != nil || n.MaxBytes != 1000 || n.MaxKeys != 10 {
			t.Fatalf("the store is %+v, %v", n, err)
		}
		s := pairs.New(fmt.Sprintf("/proc/self/fd/%d", n.Dir.Fd()), pairs.Limits{Bytes: n.MaxBytes, Keys: n.MaxKeys})
		if _, err := s.Increment(t.Context(), "n", 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := open("empty", user); err != nil {
		t.Fatal(err)
	}
	if stores, err := Stores(root); err != nil || len(stores) != 1 || stores[0].Namespace != "shop" || stores[0].Bytes == 0 ||
		stores[0].Changed.IsZero() {
		t.Errorf("Stores = %v, %v", stores, err)
	}
	if err := RemoveStore(t.Context(), root, "shop"); err != nil {
		t.Error(err)
	}
	for _, namespace := range []string{"shop", "empty", "missing"} {
		if err := RemoveStore(t.Context(), root, namespace); !errdefs.IsNotFound(err) {
			t.Errorf("RemoveStore(%q): %v, want ErrNotFound", namespace, err)
		}
	}
	if stores, err := Stores(t.TempDir()); stores != nil || err != nil {
		t.Errorf("Stores of another node = %v, %v", stores, err)
	}
	b.cfg.Pairs.Bytes = 0
	if _, err := open("shop", user); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "wasm.keyvalue_bytes is 0") {
		t.Errorf("on a node that keeps no pairs: %v", err)
	}
}

// TestStoreOfAnotherUser: a new wasm.user gets the files of the stores, but nothing that a worker has linked there, and the
// removal leaves nothing to root.
func TestStoreOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test changes owners, so it must run as root")
	}
	b := &Backend{}
	b.cfg.Root, b.cfg.UID, b.cfg.GID = t.TempDir(), 1000, 2000
	open := func() string {
		dir, err := b.makeStore("shop")
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		return dir.Name()
	}
	check := func(path string, uid, gid uint32) {
		t.Helper()
		var s unix.Stat_t
		if err := unix.Lstat(path, &s); err != nil || s.Uid != uid || s.Gid != gid {
			t.Errorf("%s belongs to %d:%d, %v; want %d:%d", path, s.Uid, s.Gid, err, uid, gid)
		}
	}
	dir := open()
	if _, err := pairs.New(dir, pairs.Limits{Bytes: 1000, Keys: 10}).Increment(t.Context(), "n", 1); err != nil {
		t.Fatal(err)
	}
	open()
	b.cfg.UID, b.cfg.GID = 1001, 2001
	open()
	for _, name := range []string{"", "pairs.db", "lock", "turn"} {
		check(filepath.Join(dir, name), 1001, 2001)
	}

	others := filepath.Join(b.cfg.Root, "others")
	for _, err := range []error{
		os.WriteFile(others, nil, 0o600), os.Remove(filepath.Join(dir, "lock")), os.Remove(filepath.Join(dir, "turn")),
		os.Link(others, filepath.Join(dir, "lock")), os.Symlink(others, filepath.Join(dir, "turn")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b.cfg.UID = 1002
	open()
	check(others, 0, 0)
	check(filepath.Join(dir, "pairs.db"), 1002, 2001)

	if err := errors.Join(os.Remove(filepath.Join(dir, "lock")), os.Remove(filepath.Join(dir, "turn")),
		RemoveStore(t.Context(), b.cfg.Root, "shop")); err != nil {
		t.Fatal(err)
	}
	check(filepath.Join(dir, "lock"), 1002, 2001)
	check(filepath.Join(dir, "turn"), 1002, 2001)
}
