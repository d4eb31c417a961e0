package guestagent

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
)

func TestLookUp(t *testing.T) {
	dir := t.TempDir()
	passwd, group := filepath.Join(dir, "passwd"), filepath.Join(dir, "group")
	os.WriteFile(passwd, []byte("root:x:0:0:root:/root:/bin/ash\n# a comment\nbroken:line\nann:x:1000:100:Ann:/home/ann:/bin/sh\n7:x:70:70::/:/bin/sh\nbob:x:7:7::/:/bin/sh\nhuge:x:4294967296:1::/:/bin/sh\n"), 0o644)
	os.WriteFile(group, []byte("users:x:100:\nwheel:x:10:root,ann\ndisk:x:6:ann,bob\n"), 0o644)
	for spec, want := range map[string]user{
		"":          {name: "root", home: "/root", shell: "/bin/ash"},
		"0":         {name: "root", home: "/root", shell: "/bin/ash"},
		"ann":       {name: "ann", uid: 1000, gid: 100, groups: []uint32{10, 6}, home: "/home/ann", shell: "/bin/sh"},
		"1000:disk": {name: "ann", uid: 1000, gid: 6, home: "/home/ann", shell: "/bin/sh"},
		"ann:4":     {name: "ann", uid: 1000, gid: 4, home: "/home/ann", shell: "/bin/sh"},
		"7":         {name: "7", uid: 70, gid: 70, home: "/", shell: "/bin/sh"}, // a name, not an ID
		"70":        {name: "7", uid: 70, gid: 70, home: "/", shell: "/bin/sh"},
		"4000":      {uid: 4000, home: "/", shell: "/bin/sh"},
	} {
		if spec == "root" || spec == "" || spec == "0" {
			want.groups = []uint32{10}
		}
		got, err := lookUp(spec, passwd, group)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("lookUp(%q) = %+v, %v; want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"nobody", "ann:nogroup", "-1", "4294967296", "huge"} {
		if got, err := lookUp(spec, passwd, group); err == nil {
			t.Errorf("lookUp(%q) = %+v, want an error", spec, got)
		}
	}
	if got, err := lookUp("", filepath.Join(dir, "none"), group); err != nil || got.name != "root" || got.home != "/root" {
		t.Errorf("lookUp without a database = %+v, %v; want root", got, err)
	}
}

func TestEnvironment(t *testing.T) {
	env := user{name: "ann", home: "/tmp", shell: "/bin/sh"}.environment(true, []string{"PATH=/x", "A=1", "A=2", "TERM=dumb"})
	slices.Sort(env)
	if want := []string{"A=2", "HOME=/tmp", "LOGNAME=ann", "PATH=/x", "SHELL=/bin/sh", "TERM=dumb", "USER=ann"}; !slices.Equal(env, want) {
		t.Errorf("environment = %q, want %q", env, want)
	}
}

func TestFiguresOf(t *testing.T) {
	if total, available := memoryOf("MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nbad\n"); total != 2<<20 || available != 1<<20 {
		t.Errorf("memoryOf = %d, %d; want %d, %d", total, available, 2<<20, 1<<20)
	}
	if load := loadOf("0.10 1.25 12.00 1/123 456\n"); load != [3]uint64{10, 125, 1200} {
		t.Errorf("loadOf = %d, want 10, 125, 1200", load)
	}
	var paths []string
	for _, f := range filesystemsOf("rootfs / rootfs rw 0 0\nproc /proc proc rw 0 0\n/dev/vda1 /data\\040disk ext4 rw 0 0\n/dev/vda1 /again ext4 rw 0 0\nserver:/x /nfs nfs rw 0 0\nshort\n") {
		paths = append(paths, f.Path)
	}
	if want := []string{"/", "/data disk"}; !slices.Equal(paths, want) {
		t.Errorf("filesystemsOf has the paths %q, want %q", paths, want)
	}
}

// TestFindPort: a port is found by udev's link or by its name in sysfs. No port is found while the device or its name
// is missing.
func TestFindPort(t *testing.T) {
	dev, sys := t.TempDir(), t.TempDir()
	if got := findPort("a.b", dev, sys); got != "" {
		t.Errorf("findPort without ports = %q, want none", got)
	}
	for port, name := range map[string]string{"vport1p1": "org.qemu.guest_agent.0\n", "vport1p2": "a.b\n", "vport2p1": ""} {
		os.Mkdir(filepath.Join(sys, port), 0o755)
		os.WriteFile(filepath.Join(sys, port, "name"), []byte(name), 0o644)
	}
	if got := findPort("a.b", dev, sys); got != "" {
		t.Errorf("findPort without the device = %q, want none", got)
	}
	os.WriteFile(filepath.Join(dev, "vport1p2"), nil, 0o600)
	if got, want := findPort("a.b", dev, sys), filepath.Join(dev, "vport1p2"); got != want {
		t.Errorf("findPort = %q, want %q", got, want)
	}
	os.Mkdir(filepath.Join(dev, "virtio-ports"), 0o755)
	link := filepath.Join(dev, "virtio-ports", "a.b")
	os.Symlink("../vport1p2", link)
	if got := findPort("a.b", dev, sys); got != link {
		t.Errorf("findPort = %q, want udev's link %q", got, link)
	}
}
