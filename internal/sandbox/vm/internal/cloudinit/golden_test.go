package cloudinit

import (
	"bytes"
	"io"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"testing"

	reader "github.com/kdomanski/iso9660"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// volume makes a directory like the kubelet's API volumes: a directory with a timestamp that holds the files, a link
// ..data to it, and links for the top-level names.
func volume(t *testing.T, kind, name string, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pods/uid/volumes/kubernetes.io~"+kind, name)
	const version = "..2026_11_21_15_00_00.123456789"
	if err := os.MkdirAll(filepath.Join(dir, version), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range slices.Sorted(maps.Keys(files)) {
		at := filepath.Join(dir, version, file)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o644)
		if kind == "secret" {
			mode = 0o400
		}
		if err := os.WriteFile(at, []byte(files[file]), mode); err != nil {
			t.Fatal(err)
		}
		for top := file; ; top = path.Dir(top) {
			if path.Dir(top) == "." {
				if err := os.Symlink("..data/"+top, filepath.Join(dir, top)); err != nil && !os.IsExist(err) {
					t.Fatal(err)
				}
				break
			}
		}
	}
	if err := os.Symlink(version, filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// plainFile makes a file on the node.
func plainFile(t *testing.T, content string) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(at, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return at
}

// options parses annotations.
func options(t *testing.T, all map[string]string) annotations.Options {
	t.Helper()
	o, _, err := annotations.Parse(all)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// eth0 is an interface as CNI's bridge plugin makes it. eth1 has a gateway outside its network, and eth2 has no
// addresses.
var (
	eth0 = Interface{
		Name: "eth0", MAC: "52:54:00:12:34:56", MTU: 1500,
		Addrs: []netip.Prefix{netip.MustParsePrefix("10.88.0.5/16"), netip.MustParsePrefix("fd00:88::5/64")},
		Routes: []Route{
			{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.88.0.1")},
			{Dst: netip.MustParsePrefix("::/0"), Via: netip.MustParseAddr("fd00:88::1")},
		},
	}
	eth1 = Interface{
		Name: "eth1", MAC: "0A:58:0A:F4:00:07", MTU: 1450,
		Addrs: []netip.Prefix{netip.MustParsePrefix("10.244.0.7/32")},
		Routes: []Route{
			{Dst: netip.MustParsePrefix("169.254.1.1/32")},
			{Dst: netip.MustParsePrefix("172.16.0.0/12"), Via: netip.MustParseAddr("169.254.1.1"), Metric: 50},
			{Dst: netip.MustParsePrefix("10.96.0.0/12"), Via: netip.MustParseAddr("10.99.0.1")},
			{Dst: netip.MustParsePrefix("10.97.0.0/24")},
		},
	}
	eth2 = Interface{Name: "eth2", MAC: "52:54:00:12:34:57"}
	dns  = DNS{Servers: []string{"10.96.0.10", "fd00:96::a"}, Search: []string{"default.svc.cluster.local", "svc.cluster.local"}}
)

// base returns the input of a pod with only the given annotations.
func base(t *testing.T, all map[string]string) Input {
	return Input{
		Options: options(t, all), PodUID: "4f6c5bd2-6d3f-4c1b-9c8e-5d1b3f5b7a10", Hostname: "web-0",
		Interfaces: []Interface{eth0}, DNS: dns,
	}
}

// shapes are the inputs that have golden files, by their directory in testdata/golden.
var shapes = map[string]func(t *testing.T) Input{
	"plain": func(t *testing.T) Input { return base(t, nil) },
	"agent": func(t *testing.T) Input {
		in := base(t, nil)
		in.Agent = true
		return in
	},
	"agent-configdrive": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitImageType": "configdrive"})
		in.Agent = true
		return in
	},
	"ssh-keys": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletSSHKeys": "ssh-rsa AAAA== me@a\nssh-ed25519 BBBB <me> & \"you\"\n",
			"VirtletSSHKeySource": "secret/keys"})
		in.Mounts = []Mount{{HostPath: volume(t, "secret", "keys", map[string]string{"authorized_keys": "ssh-rsa CCCC== first\n"}),
			ContainerPath: "/mnt/keys"}}
		return in
	},
	"ssh-keys-configdrive": func(t *testing.T) Input {
		in := base(t, map[string]string{
			"VirtletSSHKeys": "ssh-rsa AAAA== me@a\n", "VirtletSSHKeySource": "configmap/keys/mine", "VirtletCloudInitUserDataOverwrite": "true",
			"VirtletCloudInitImageType": "configdrive",
		})
		in.Mounts = []Mount{{HostPath: volume(t, "configmap", "other", map[string]string{"mine": "ssh-rsa CCCC== first\n"}),
			ContainerPath: SourceDir + "/configmap/keys"}}
		return in
	},
	"meta-data": func(t *testing.T) Input {
		return base(t, map[string]string{"VirtletCloudInitMetaData": "instance-id: mine\nnumber: 12345678901234567890\nlist: [1.50, \"on\", null]\n"})
	},
	"meta-data-configdrive": func(t *testing.T) Input {
		return base(t, map[string]string{"VirtletCloudInitMetaData": `{"instance-id": "mine", "hostname": "other"}`,
			"VirtletCloudInitImageType": "configdrive"})
	},
	"user-data": func(t *testing.T) Input {
		in := base(t, map[string]string{
			"VirtletCloudInitUserData":       "#cloud-config\nusers:\n- name: cloudy\n  sudo: 'no'\nruncmd: [[echo, second]]\ngrowpart: {mode: 'off', devices: [/dev/vda1]}\nwrite_files:\n- {path: /x, permissions: '0600', content: \"a\\n  b: c\\n\"}\n",
			"VirtletCloudInitUserDataSource": "configmap/vm-user-data",
		})
		in.Mounts = []Mount{{ContainerPath: SourceDir + "/configmap/vm-user-data", HostPath: volume(t, "configmap", "v", map[string]string{
			"users": "- name: first\n", "runcmd": "[[echo, first]]\n", "growpart": "{mode: auto, devices: [/], ignore_growroot_disabled: true}",
			"timezone": "Europe/Rome\n",
		})}}
		in.Env = []EnvVar{{"A", "1"}}
		return in
	},
	"user-data-overwrite": func(t *testing.T) Input {
		in := base(t, map[string]string{
			"VirtletCloudInitUserData": "users: [default]\n", "VirtletCloudInitUserDataOverwrite": "true",
			"VirtletCloudInitUserDataSource": "secret/vm",
		})
		in.Mounts = []Mount{{ContainerPath: "/mnt",
			HostPath: volume(t, "secret", "vm", map[string]string{"users": "- name: first\n", "timezone": "UTC"})}}
		return in
	},
	"form-include":      document("#include\nhttp://example.com/a\n"),
	"form-include-once": document("#include-once\nhttp://example.com/a\n"),
	"form-script":       document("#!/bin/sh\necho ä >/dev/console"),
	"form-boothook":     document("#cloud-boothook\n#!/bin/sh\necho hi\n"),
	"form-part-handler": document("#part-handler\ndef list_types():\n    return ['text/mine']\ndef handle_part(data, ctype, filename, payload):\n    pass\n"),
	"form-archive":      document("#cloud-config-archive\n- content: |\n    #cloud-config\n    mounts: [[swap, none]]\n- {type: text/x-shellscript, content: \"#!/bin/sh\\n\"}\n"),
	"form-jsonp":        document("#cloud-config-jsonp\n[{\"op\": \"add\", \"path\": \"/mounts\", \"value\": [[\"swap\", \"none\"]]}]\n"),
	"form-template":     document("## template: jinja\n#cloud-config\nwrite_files:\n- {path: /name, content: \"{{ v1.local_hostname }}\"}\n{% if true %}\nmounts: [[swap, none]]\n{% endif %}\n"),
	"form-mime":         document("Content-Type: multipart/mixed; boundary=\"b\"\nMIME-Version: 1.0\n\n--b\nContent-Type: text/cloud-config\n\nmounts: [[swap, none]]\n\n--b\nContent-Type: text/x-shellscript\n\n#!/bin/sh\n\n--b--\n"),
	"form-alone": func(t *testing.T) Input {
		return base(t, map[string]string{"VirtletCloudInitUserData": "#!/bin/sh\necho alone\n"})
	},
	"form-mail": func(t *testing.T) Input { // a cloud-config that cloud-init would read as a MIME message
		return base(t, map[string]string{"VirtletCloudInitUserData": "write_files:\n- {path: /mail, content: \"MIME-Version: 1.0\\n\"}\n"})
	},
	"form-template-source": func(t *testing.T) Input {
		in := document("## template: jinja\n#cloud-config\nusers: [default]\nbootcmd: [[ls, /dev/testpvc]]\n")(t)
		in.Options.UserDataSource, in.Options.UserDataOverwrite = annotations.Source{Kind: "secret", Name: "vm"}, true
		in.Devices = []Device{{Serial: "disk0", Path: "/dev/testpvc"}}
		in.Mounts = append(in.Mounts, Mount{ContainerPath: SourceDir + "/secret/vm", HostPath: volume(t, "secret", "vm", map[string]string{
			"users": "- name: first\n", "timezone": "UTC", "mounts": "- [/dev/testpvc, /mnt]\n",
		})})
		return in
	},
	"user-data-script": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitUserDataScript": "@virtlet-mount-script@\necho done\n"})
		in.Mounts = []Mount{{HostPath: t.TempDir(), ContainerPath: "/data", Tag: ShareTag(0)}}
		in.Devices = []Device{{Serial: "disk0", Path: "/dev/testpvc"}}
		return in
	},
	"user-data-whole": func(t *testing.T) Input {
		in := base(t, map[string]string{
			"VirtletCloudInitUserDataSource": "configmap/vm", "VirtletCloudInitUserDataSourceKey": "user-data",
			"VirtletCloudInitUserDataSourceEncoding": "base64",
		})
		in.Mounts = []Mount{{ContainerPath: SourceDir + "/configmap/vm",
			HostPath: volume(t, "configmap", "vm", map[string]string{"user-data": "I2Nsb3VkLWNvbmZp\nZwpydW5jbWQ6IFtsc10K\n"})}}
		return in
	},
	"volumes": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitUserData": "mounts:\n- [/dev/testpvc, /mnt/it's]\n- [swap, none]\n"})
		in.Mounts = []Mount{
			{HostPath: volume(t, "secret", "s", map[string]string{"password": "hunter2", "key.bin": "\x00\xff\x01"}), ContainerPath: "/etc/baz"},
			{HostPath: volume(t, "configmap", "c", map[string]string{"app.conf": "a = 1\n\tb = \"2\"\n", "sub/deep/x": "below\n"}),
				ContainerPath: "/etc/foo bar/"},
			{HostPath: volume(t, "downward-api", "d", map[string]string{"labels": "app=\"web\"\n"}), ContainerPath: "/etc/podinfo"},
			{HostPath: volume(t, "projected", "kube-api-access-x", map[string]string{"token": "t", "ca.crt": "c"}),
				ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount"},
			{HostPath: plainFile(t, "10.88.0.5\tweb-0\n"), ContainerPath: "/etc/hosts"},
			{HostPath: t.TempDir(), ContainerPath: "/data/", Tag: ShareTag(0)},
			{HostPath: t.TempDir(), ContainerPath: "/ro;date", ReadOnly: true, Tag: ShareTag(1)},
		}
		in.Devices = []Device{{Serial: "disk0", Path: "/dev/testpvc"}, {Serial: "disk1", Path: "/dev/disk by/it's"}}
		return in
	},
	"volumes-virtiofs": func(t *testing.T) Input {
		in := base(t, nil)
		in.ShareDriver = machine.ShareVirtiofs
		in.Mounts = []Mount{
			{HostPath: volume(t, "secret", "s", map[string]string{"password": "hunter2"}), ContainerPath: "/data/keys", ReadOnly: true,
				Tag: ShareTag(0)},
			{HostPath: plainFile(t, "10.88.0.5\tweb-0\n"), ContainerPath: "/etc/hosts"},
			{HostPath: t.TempDir(), ContainerPath: "/data", Tag: ShareTag(1)},
		}
		return in
	},
	"volumes-scsi": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitUserData": "mounts: [[/dev/testpvc, /mnt]]", "VirtletDiskDriver": "scsi"})
		in.Devices = []Device{{Serial: "disk0", Path: "/dev/testpvc"}}
		return in
	},
	"files": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletFilesFromDataSource": "secret/files"})
		in.Mounts = []Mount{{ContainerPath: SourceDir + "/secret/files", HostPath: volume(t, "secret", "f", map[string]string{
			"locale": "LANG=\"pl_PL.UTF-8\"\n", "locale_path": "/etc/locale.conf\n", "locale_encoding": "plain\n",
			"host_conf": "bXVsdGkgb2ZmCg==\n", "host_conf_path": "etc//host.conf",
			"x_path": "IyEK", "x_path_path": "/x_path", // a file whose own key ends in _path
		})}}
		return in
	},
	"environment": func(t *testing.T) Input {
		in := base(t, nil)
		in.Env = []EnvVar{
			{"MY_FOO_VAR", "foo"}, {"MY_FOOBAR_VAR", "foo bar"}, {"EMPTY", ""}, {"TWICE", "1"}, {"QUOTES", `it's "so" \`},
			{"DOLLAR", "$HOME `id` $$"},
			{"LINES", "a\nb\n"}, {"TWICE", "2"}, {"URL", "http://x/?a=b&c=%20#d"}, {"UMLAUT", "ä"}, {"no.shell-name", "x"},
			{"PATH", "/usr/bin:/bin"},
		}
		return in
	},
	"network": func(t *testing.T) Input {
		in := base(t, nil)
		in.Interfaces = []Interface{eth0, eth1, eth2}
		return in
	},
	"network-configdrive": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitImageType": "configdrive"})
		in.Interfaces = []Interface{eth0, eth1, eth2}
		return in
	},
	"network-configdrive-search": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitImageType": "configdrive"})
		in.Interfaces, in.DNS.Servers = []Interface{eth0}, nil
		return in
	},
	"network-dhcp": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletForceDHCPNetworkConfig": "true"})
		in.Interfaces = []Interface{eth0, eth1, eth2}
		return in
	},
	"network-dhcp-configdrive": func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletForceDHCPNetworkConfig": "true", "VirtletCloudInitImageType": "configdrive"})
		in.Interfaces = []Interface{eth0, eth1, eth2}
		return in
	},
	"network-ipv6-only": func(t *testing.T) Input {
		in := base(t, nil)
		in.Interfaces = []Interface{{
			Name: "eth0", MAC: "52:54:00:12:34:56", Addrs: []netip.Prefix{netip.MustParsePrefix("fd00:88::5/128")},
			Routes: []Route{{Dst: netip.MustParsePrefix("::/0"), Via: netip.MustParseAddr("fe80::1")}},
		}}
		in.DNS = DNS{Servers: []string{"fd00:96::a"}}
		return in
	},
	"network-none": func(t *testing.T) Input {
		in := base(t, nil)
		in.Interfaces, in.DNS = nil, DNS{}
		return in
	},
}

// document returns the shape of a pod with user-data in a form of its own, and with files and mounts.
func document(text string) func(t *testing.T) Input {
	return func(t *testing.T) Input {
		in := base(t, map[string]string{"VirtletCloudInitUserData": text})
		in.Env = []EnvVar{{"A", "1"}}
		in.Mounts = []Mount{{HostPath: t.TempDir(), ContainerPath: "/data", Tag: ShareTag(0)}}
		return in
	}
}

// TestGolden compares all files on each shape of disk with the golden files; UPDATE=1 in the environment writes them.
// cloud-init 22.4 (Debian 12) accepted the golden files: its schema, its NoCloud and ConfigDrive readers, and its
// network renderers. Its user-data processor and its handlers found the documents in form-* unchanged, and appended our
// mounts and files to those of the document. A guest booted with such a disk got the name, addresses, routes,
// resolvers, environment, files, shares, device links and agent.
func TestGolden(t *testing.T) {
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			in := shape(t)
			image, err := Build(in)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Build(in)
			if err != nil || !bytes.Equal(again.Bytes, image.Bytes) {
				t.Errorf("the second image of the same input differs (error: %v)", err)
			}
			label, got := contents(t, image.Bytes)
			if label != image.Label {
				t.Errorf("label = %q, want %q", label, image.Label)
			}
			var warnings bytes.Buffer
			for _, w := range image.Warnings {
				warnings.WriteString(w + "\n")
			}
			if warnings.Len() > 0 {
				got["warnings"] = warnings.Bytes()
			}
			dir := filepath.Join("testdata", "golden", name)
			if os.Getenv("UPDATE") != "" {
				write(t, dir, got)
			}
			var want []string
			err = filepath.WalkDir(dir, func(at string, e os.DirEntry, err error) error {
				if err == nil && !e.IsDir() {
					at, err = filepath.Rel(dir, at)
					want = append(want, at)
				}
				return err
			})
			if err != nil || !slices.Equal(want, slices.Sorted(maps.Keys(got))) {
				t.Fatalf("the image has files %v, want %v (error: %v)", slices.Sorted(maps.Keys(got)), want, err)
			}
			for file, data := range got {
				want, err := os.ReadFile(filepath.Join(dir, file))
				if err != nil || !bytes.Equal(want, data) {
					t.Errorf("%s differs from the golden file (error: %v; UPDATE=1 writes it):\n%s", file, err, data)
				}
			}
		})
	}
}

func write(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for name, data := range files {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// contents returns the label and files of an image, read with another implementation.
func contents(t *testing.T, image []byte) (string, map[string][]byte) {
	t.Helper()
	r, err := reader.OpenImage(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	label, err := r.Label()
	if err != nil {
		t.Fatal(err)
	}
	root, err := r.RootDir()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	var walk func(dir *reader.File, at string)
	walk = func(dir *reader.File, at string) {
		children, err := dir.GetChildren()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range children {
			name := path.Join(at, c.Name())
			if c.IsDir() {
				walk(c, name)
				continue
			}
			if files[name], err = io.ReadAll(c.Reader()); err != nil {
				t.Fatal(err)
			}
		}
	}
	walk(root, "")
	return label, files
}
