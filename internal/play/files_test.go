package play

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const withVolumes = `
apiVersion: v1
kind: ConfigMap
metadata: {name: m}
data: {a: "1", b: "2"}
---
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  securityContext: {fsGroup: 4321}
  hostAliases: [{ip: 192.0.2.7, hostnames: [db]}]
  volumes:
  - {name: data, emptyDir: {}}
  - {name: conf, configMap: {name: m, defaultMode: 0400, items: [{key: a, path: x/a}, {key: b, path: b, mode: 0777}]}}
  containers: [{name: c, image: i}]
`

func planIn(t *testing.T, dir, text string) *Pod {
	t.Helper()
	m, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	o := options()
	o.VolumeDir = dir
	pods, err := m.Plan(o)
	if err != nil {
		t.Fatal(err)
	}
	return pods[0]
}

func TestVolumes(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077)) // has no effect on the modes
	dir := filepath.Join(t.TempDir(), "volumes")
	release, err := LockVolumes(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := planIn(t, dir, withVolumes)
	if err := p.MakeVolumes(); err != nil {
		t.Fatal(err)
	}
	if err := p.WriteHosts([]string{"192.0.2.1"}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]struct {
		mode os.FileMode
		text string
	}{
		"volumes/data":     {mode: os.ModeDir | os.ModeSetgid | 0o777},
		"volumes/conf":     {mode: os.ModeDir | os.ModeSetgid | 0o755},
		"volumes/conf/x/a": {mode: 0o440, text: "1"},
		"volumes/conf/b":   {mode: 0o777, text: "2"},
		"etc-hosts":        {mode: 0o644, text: "192.0.2.1\tp\n192.0.2.7\tdb\n"},
	} {
		info, err := os.Stat(filepath.Join(dir, "uid-1", name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&^0o040 != want.mode&^0o040 && name != "etc-hosts" {
			t.Errorf("mode of %s: got %s, want %s", name, info.Mode(), want.mode)
		}
		if group := info.Sys().(*syscall.Stat_t).Gid; strings.HasPrefix(name, "volumes/") && group != 4321 {
			t.Errorf("group of %s: got %d, want the pod's 4321", name, group)
		}
		if want.text == "" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, "uid-1", name))
		if err != nil || !strings.HasSuffix(string(text), want.text) {
			t.Errorf("%s: got %q, %v; want %q", name, text, err, want.text)
		}
	}
	checkSweep(t, dir, release)
}

// checkSweep: a sweep removes the volumes of pods that are gone, but none while a pod is being made.
func checkSweep(t *testing.T, dir string, release func()) {
	t.Helper()
	gone := func(string) bool { return false }
	exists := func() bool { _, err := os.Stat(filepath.Join(dir, "uid-1")); return err == nil }
	for _, step := range []struct {
		what   string
		before func()
		keep   func(string) bool
		want   bool
	}{
		{"under the lock", func() {}, gone, true},
		{"of a pod that exists", release, func(uid string) bool { return uid == "uid-1" }, true},
		{"of a pod that is gone", func() {}, gone, false},
	} {
		step.before()
		if err := SweepVolumes(dir, step.keep); err != nil || exists() != step.want {
			t.Errorf("sweep %s: error %v, the volumes exist: %t, want %t", step.what, err, exists(), step.want)
		}
	}
	if err := SweepVolumes(filepath.Join(dir, "missing"), gone); err != nil {
		t.Errorf("sweep without volumes: %v", err)
	}
}

// TestRemoveVolumes: the UID of a foreign pod removes nothing outside.
func TestRemoveVolumes(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "keep")
	if err := os.MkdirAll(filepath.Join(dir, "volumes", "u"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keep, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"", ".", "..", "../keep", "u/..", "/", keep, "missing"} {
		if err := RemoveVolumes(filepath.Join(dir, "volumes"), uid); err != nil {
			t.Errorf("RemoveVolumes(%q): %v", uid, err)
		}
	}
	for _, name := range []string{keep, filepath.Join(dir, "volumes", "u")} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
	if err := RemoveVolumes(filepath.Join(dir, "volumes"), "u"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "volumes", "u")); !os.IsNotExist(err) {
		t.Errorf("after the removal: got %v, want no directory", err)
	}
}

func TestHostPaths(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path, kind string
		want       error
		made       bool
	}{
		{"file", "File", nil, true},
		{"file", "", nil, true},
		{"file", "Directory", errdefs.ErrInvalidArgument, true},
		{"file", "Socket", errdefs.ErrInvalidArgument, true},
		{"file", "BlockDevice", errdefs.ErrInvalidArgument, true},
		{"file", "DirectoryOrCreate", errdefs.ErrInvalidArgument, true},
		{"a/b", "Directory", fs.ErrNotExist, false},
		{"a/b", "", nil, false},
		{"a/b", "DirectoryOrCreate", nil, true},
		{"new", "FileOrCreate", nil, true},
	} {
		name := filepath.Join(dir, c.path)
		p := planIn(t, dir, pod("", "volumes: [{name: v, hostPath: {path: "+name+", type: '"+c.kind+"'}}]"))
		if err := p.MakeVolumes(); !errors.Is(err, c.want) {
			t.Errorf("%s %q: got error %v, want %v", c.path, c.kind, err, c.want)
		}
		if _, err := os.Stat(name); (err == nil) != c.made {
			t.Errorf("%s %q exists: %v, want %t", c.path, c.kind, err, c.made)
		}
	}
}
