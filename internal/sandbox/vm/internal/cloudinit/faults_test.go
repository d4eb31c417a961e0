package cloudinit

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// refused checks that Build fails with an error that has the class and the words.
func refused(t *testing.T, in Input, class func(error) bool, words ...string) {
	t.Helper()
	image, err := Build(in)
	if image != nil || !class(err) {
		t.Errorf("Build returns an image: %t, error %v; want no image and another error class", image != nil, err)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("Build error = %v, want one with %q", err, w)
		}
	}
}

func TestHostileInput(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Input)
		words  []string
	}{
		"host name with a line break": {func(in *Input) { in.Hostname = "web\nruncmd: [reboot]" },
			[]string{"hostname", `"web\nruncmd: [reboot]"`}},
		"host name with a quote":       {func(in *Input) { in.Hostname = `web"` }, []string{"hostname"}},
		"no host name":                 {func(in *Input) { in.Hostname = "" }, []string{"hostname"}},
		"long host name":               {func(in *Input) { in.Hostname = strings.Repeat("a", 64) }, []string{"hostname"}},
		"no uid":                       {func(in *Input) { in.PodUID = "" }, []string{"instance-id"}},
		"variable with a line break":   {func(in *Input) { in.Env = []EnvVar{{"A\nB", "x"}} }, []string{"environment", `"A\nB"`}},
		"variable with an equals sign": {func(in *Input) { in.Env = []EnvVar{{"A=B", "x"}} }, []string{"environment"}},
		"variable that is not text":    {func(in *Input) { in.Env = []EnvVar{{"A\xff", "x"}} }, []string{"environment"}},
		"variable without a name":      {func(in *Input) { in.Env = []EnvVar{{"", "x"}} }, []string{"environment"}},
		"value with NUL":               {func(in *Input) { in.Env = []EnvVar{{"A", "x\x00"}} }, []string{"environment", "A"}},
		"relative mount":               {func(in *Input) { in.Mounts = []Mount{{HostPath: "/", ContainerPath: "data"}} }, []string{"mount"}},
		"mount with a line break": {func(in *Input) { in.Mounts = []Mount{{HostPath: "/", ContainerPath: "/a\nb", Tag: ShareTag(0)}} },
			[]string{"mount"}},
		"share with a blank": {func(in *Input) { in.Mounts = []Mount{{HostPath: "/", ContainerPath: "/a b", Tag: ShareTag(0)}} },
			[]string{"/a b", "fstab"}},
		"share without a tag": {func(in *Input) { in.Mounts = []Mount{{HostPath: "/", ContainerPath: "/a"}} }, []string{"tag"}},
		"share with a tag of its own": {func(in *Input) { in.Mounts = []Mount{{HostPath: "/", ContainerPath: "/a", Tag: "x:0 /etc"}} },
			[]string{"tag"}},
		"pipe": {func(in *Input) { in.Mounts = []Mount{{HostPath: pipe(t), ContainerPath: "/a"}} },
			[]string{"/a", "neither"}},
		"serial with a quote":  {func(in *Input) { in.Devices = []Device{{"d'", "/dev/x"}} }, []string{"device"}},
		"long serial":          {func(in *Input) { in.Devices = []Device{{strings.Repeat("d", 21), "/dev/x"}} }, []string{"device"}},
		"device at the root":   {func(in *Input) { in.Devices = []Device{{"d", "/"}} }, []string{"device"}},
		"MAC":                  {func(in *Input) { in.Interfaces[0].MAC = "52:54:00:12:34:56\nx: y" }, []string{"interface"}},
		"MAC of another kind":  {func(in *Input) { in.Interfaces[0].MAC = "52:54:00:12:34:56:00:00" }, []string{"interface"}},
		"name of an interface": {func(in *Input) { in.Interfaces[0].Name = "eth0: {}" }, []string{"interface"}},
		"DNS server":           {func(in *Input) { in.DNS.Servers = []string{"dns.example"} }, []string{"DNS server", "dns.example"}},
		"search domain":        {func(in *Input) { in.DNS.Search = []string{"a b"} }, []string{"search domain", "a b"}},
		"write_files that are no list": {func(in *Input) {
			in.Options.UserData = map[string]any{"write_files": "x"}
			in.Env = []EnvVar{{"A", "1"}}
		}, []string{"write_files"}},
		"mounts that are no list": {func(in *Input) { in.Options.UserData = map[string]any{"mounts": map[string]any{}} },
			[]string{"mounts"}},
		"source that is not mounted": {func(in *Input) { in.Options.UserDataSource = annotations.Source{Kind: "secret", Name: "s"} },
			[]string{"secret/s", SourceDir + "/secret/s", `"s"`}},
		"SSH keys that are not mounted": {func(in *Input) {
			in.Options.SSHKeySource = annotations.Source{Kind: "configmap", Name: "c",
				Key: "k"}
		}, []string{"SSH keys", "configmap/c"}},
		"files that are not mounted": {func(in *Input) { in.Options.FilesSource = annotations.Source{Kind: "configmap", Name: "c"} },
			[]string{"files", "configmap/c"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []annotations.ImageType{annotations.NoCloud, annotations.ConfigDrive} {
				in := base(t, nil)
				in.Options.ImageType = kind
				in.Interfaces = []Interface{eth0}
				c.change(&in)
				refused(t, in, errdefs.IsInvalidArgument, c.words...)
			}
		})
	}
}

func pipe(t *testing.T) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(at, 0o600); err != nil {
		t.Fatal(err)
	}
	return at
}

// TestHostileVolumes: whatever a volume contains, Build reads nothing outside it, does not block, and obeys the limits.
func TestHostileVolumes(t *testing.T) {
	outside := plainFile(t, "root:x:0:0")
	for name, c := range map[string]struct {
		make  func(dir string) error
		words []string
	}{
		"absolute link": {func(dir string) error { return os.Symlink(outside, filepath.Join(dir, "a")) }, []string{"/etc/x", "a"}},
		"link upwards": {func(dir string) error {
			return os.Symlink("../../../../../../../../../etc/passwd", filepath.Join(dir, "a"))
		}, []string{"/etc/x", "a"}},
		"directory by link":   {func(dir string) error { return os.Symlink("/etc", filepath.Join(dir, "a")) }, []string{"/etc/x", "a"}},
		"link to nowhere":     {func(dir string) error { return os.Symlink("b", filepath.Join(dir, "a")) }, []string{"/etc/x", "a"}},
		"link to itself":      {func(dir string) error { return os.Symlink("a", filepath.Join(dir, "a")) }, []string{"/etc/x", "a"}},
		"directory in itself": {func(dir string) error { return os.Symlink(".", filepath.Join(dir, "a")) }, []string{"/etc/x", "symbolic links"}},
		"deep directories": {func(dir string) error {
			return os.MkdirAll(filepath.Join(dir, strings.Repeat("a/", maxDepth+1)), 0o755)
		}, []string{"/etc/x", "16 directories deep"}},
		"pipe": {func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "a"), 0o600) },
			[]string{"/etc/x", "a is not a file"}},
		"line break in a name": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "a\nb"), nil, 0o600) },
			[]string{"/etc/x", `"a\nb"`}},
		"large file": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "a"), make([]byte, maxFile+1), 0o600) },
			[]string{"/etc/x", "a is larger than the 1048576 bytes"}},
		"large volume": {func(dir string) error {
			for i := range 17 {
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), make([]byte, maxFile), 0o600); err != nil {
					return err
				}
			}
			return nil
		}, []string{"/etc/x", "more than 16777216 bytes"}},
		"many files": {func(dir string) error {
			for i := range maxFiles + 1 {
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
					return err
				}
			}
			return nil
		}, []string{"/etc/x", "more than 4096 files"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := volume(t, "configmap", "c", nil)
			if err := c.make(dir); err != nil {
				t.Fatal(err)
			}
			in := base(t, nil)
			in.Mounts = []Mount{{HostPath: dir, ContainerPath: "/etc/x"}}
			refused(t, in, errdefs.IsInvalidArgument, c.words...)
		})
	}
	t.Run("gone", func(t *testing.T) {
		in := base(t, nil)
		in.Mounts = []Mount{{HostPath: filepath.Join(t.TempDir(), "gone"), ContainerPath: "/etc/x"}}
		refused(t, in, errdefs.IsFailedPrecondition, "/etc/x", "gone")
	})
	t.Run("source gone", func(t *testing.T) {
		in := base(t, map[string]string{"VirtletSSHKeySource": "secret/s"})
		in.Mounts = []Mount{{HostPath: filepath.Join(t.TempDir(), "gone"), ContainerPath: SourceDir + "/secret/s"}}
		refused(t, in, errdefs.IsFailedPrecondition, "gone")
	})
}

func TestBadSources(t *testing.T) {
	for name, c := range map[string]struct {
		all   map[string]string
		files map[string]string
		words []string
	}{
		"key that is not there": {
			map[string]string{"VirtletCloudInitUserDataSource": "secret/s", "VirtletCloudInitUserDataSourceKey": "k"}, map[string]string{"j": ""},
			[]string{"secret/s", `"k"`},
		},
		"not base64": {
			map[string]string{"VirtletCloudInitUserDataSource": "secret/s", "VirtletCloudInitUserDataSourceKey": "k",
				"VirtletCloudInitUserDataSourceEncoding": "base64"},
			map[string]string{"k": "#!"}, []string{"secret/s", `"k"`, "base64"},
		},
		"not YAML": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"}, map[string]string{"k": "a: ["},
			[]string{"secret/s", `"k"`, "YAML"}},
		"whole document": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"}, map[string]string{"k": "#cloud-config\na: b"},
			[]string{"secret/s", `"k"`, "cloud-init-user-data-source-key"}},
		"MIME message": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"},
			map[string]string{"k": "Content-Type: text/x\nMIME-Version: 1.0\n\na"},
			[]string{"secret/s", `"k"`, "cloud-init-user-data-source-key"}},
		"files are no list": {
			map[string]string{"VirtletCloudInitUserDataSource": "secret/s", "VirtletCloudInitUserData": "#!/bin/sh"},
			map[string]string{"write_files": "text"},
			[]string{"write_files is not a list"},
		},
		"mounts are no list": {
			map[string]string{"VirtletCloudInitUserDataSource": "secret/s", "VirtletCloudInitUserData": "#!/bin/sh"},
			map[string]string{"mounts": "a: b"},
			[]string{"mounts is not a list"},
		},
		"template": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"},
			map[string]string{"k": "## template: jinja\na"}, []string{"secret/s", `"k"`, "cloud-init-user-data-source-key"}},
		"two documents": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"}, map[string]string{"k": "a\n---\nb"},
			[]string{"secret/s", `"k"`, "more than one"}},
		"compressed": {map[string]string{"VirtletCloudInitUserDataSource": "secret/s"}, map[string]string{"k": "\x1f\x8b\x08\x00"},
			[]string{"secret/s", `"k"`}},
		"SSH keys without": {map[string]string{"VirtletSSHKeySource": "secret/s"}, nil, []string{"secret/s", `"authorized_keys"`}},
		"SSH keys not text": {map[string]string{"VirtletSSHKeySource": "secret/s"}, map[string]string{"authorized_keys": "\x00"},
			[]string{"secret/s/authorized_keys"}},
		"file without a path": {map[string]string{"VirtletFilesFromDataSource": "secret/s"}, map[string]string{"a": "x"},
			[]string{"secret/s", `"a"`, "a_path"}},
		"file above the root": {map[string]string{"VirtletFilesFromDataSource": "secret/s"},
			map[string]string{"a": "x", "a_path": "/a/../../b"}, []string{"a_path"}},
		"file with a bad path": {map[string]string{"VirtletFilesFromDataSource": "secret/s"}, map[string]string{"a": "x", "a_path": "/a\n/b"},
			[]string{"a_path"}},
		"file not base64": {map[string]string{"VirtletFilesFromDataSource": "secret/s"}, map[string]string{"a": "#!", "a_path": "/a"},
			[]string{"a_encoding"}},
		"file with an encoding": {map[string]string{"VirtletFilesFromDataSource": "secret/s"},
			map[string]string{"a": "", "a_path": "/a", "a_encoding": "gzip"}, []string{`"gzip"`, "plain, base64"}},
	} {
		t.Run(name, func(t *testing.T) {
			in := base(t, c.all)
			in.Mounts = []Mount{{HostPath: volume(t, "secret", "v", c.files), ContainerPath: SourceDir + "/secret/s"}}
			refused(t, in, errdefs.IsInvalidArgument, c.words...)
		})
	}
}

func TestClassify(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		host, container string
		by9p, virtiofs  Kind
	}{
		{dir, "/data", KindShare, KindShare},
		{dir, SourceDir + "/secret/x", KindSource, KindSource},
		{dir, SourceDir + "/../data", KindShare, KindShare},
		{plainFile(t, ""), "/etc/hosts", KindFiles, KindFiles},
		{volume(t, "secret", "s", nil), "/s", KindFiles, KindShare},
		{volume(t, "configmap", "c", nil) + "/", "/s", KindFiles, KindShare},
		{volume(t, "downward-api", "d", nil), "/s", KindFiles, KindShare},
		{volume(t, "projected", "p", nil), "/s", KindFiles, KindShare},
		{volume(t, "empty-dir", "e", nil), "/s", KindShare, KindShare},
	} {
		for driver, want := range map[machine.ShareDriver]Kind{machine.Share9p: c.by9p, machine.ShareVirtiofs: c.virtiofs} {
			if got, err := Classify(c.host, c.container, driver); err != nil || got != want {
				t.Errorf("Classify(%s, %s, %s) = %d, %v; want %d", c.host, c.container, driver, got, err, want)
			}
		}
	}
	if _, err := Classify("/dev/null", "/x", machine.Share9p); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Classify of a character device: error = %v, want ErrInvalidArgument", err)
	}
	if _, err := Classify(filepath.Join(dir, "gone"), "/x", machine.Share9p); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Classify of a missing path: error = %v, want ErrFailedPrecondition", err)
	}
}

// TestInstance: each pod has its own instance-id.
func TestInstance(t *testing.T) {
	in := base(t, nil)
	first, err := Build(in)
	if err != nil {
		t.Fatal(err)
	}
	in.PodUID = "11111111-6d3f-4c1b-9c8e-5d1b3f5b7a10"
	second, err := Build(in)
	if err != nil || bytes.Equal(first.Bytes, second.Bytes) ||
		!bytes.Contains(second.Bytes, []byte(`"instance-id": "11111111-6d3f-4c1b-9c8e-5d1b3f5b7a10"`)) {
		t.Errorf("the second pod's disk equals the first's, or lacks its instance-id (error: %v)", err)
	}
}

// TestOptionsAreNotChanged: Build does not change its input.
func TestOptionsAreNotChanged(t *testing.T) {
	mounts := []any{[]any{"/dev/x", "/mnt"}}
	in := base(t, nil)
	in.Options.UserData = map[string]any{"mounts": mounts}
	in.Devices = []Device{{"disk0", "/dev/x"}}
	if _, err := Build(in); err != nil || fmt.Sprint(mounts) != "[[/dev/x /mnt]]" {
		t.Errorf("after Build (error: %v), mounts = %v, want [[/dev/x /mnt]]", err, mounts)
	}
}

// TestOnLink: only gateways outside the interface's networks are on-link.
func TestOnLink(t *testing.T) {
	for via, want := range map[string]bool{"10.88.0.1": false, "10.89.0.1": true, "169.254.1.1": true, "fe80::1": false, "fd00:88::1": false,
		"fd00:99::1": true} {
		if got := eth0.onLink(netip.MustParseAddr(via)); got != want {
			t.Errorf("onLink(%s) = %t, want %t", via, got, want)
		}
	}
}
