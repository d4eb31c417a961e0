package annotations

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// field is an annotation's value and its effect on the options.
type field struct {
	value string
	want  func(*Options)
}

// cases has values for every annotation in Known: good are allowed, bad are not.
var cases = map[string]struct {
	good []field
	bad  []string
}{
	"vcpu-count": {
		good: []field{
			{"1", func(o *Options) { o.VCPUs, o.VCPUsSet = 1, true }},
			{"255", func(o *Options) { o.VCPUs, o.VCPUsSet = 255, true }},
		},
		bad: []string{"0", "-1", "256", "1.5", "two", " 2", "0x2", "99999999999999999999", "2\n"},
	},
	"cpu-model": {
		good: []field{
			{"host-model", func(o *Options) { o.CPUModel = "host-model" }},
			{"Skylake-Client-v4", func(o *Options) { o.CPUModel = "Skylake-Client-v4" }},
		},
		bad: []string{"qemu64,+vmx", "-cpu", "a b", "host\n", strings.Repeat("x", 65)},
	},
	"libvirt-cpu-setting": {
		good: []field{
			{"Mode: host-passthrough", func(o *Options) { o.LibvirtCPU = `<cpu mode="host-passthrough"></cpu>` }},
			{"Match: exact\nModel:\n  Fallback: allow\n  Value: core2duo\n", func(o *Options) {
				o.LibvirtCPU = `<cpu match="exact"><model fallback="allow">core2duo</model></cpu>`
			}},
			{`{"Vendor": "</cpu><devices>"}`, func(o *Options) { o.LibvirtCPU = `<cpu><vendor>&lt;/cpu&gt;&lt;devices&gt;</vendor></cpu>` }},
		},
		bad: []string{"Mood: host", "- a", "Mode: [", "XMLName: {Local: devices}", "Mode: a\nMode: b", strings.Repeat("# x\n", maxText)},
	},
	"system-uuid": {
		good: []field{{"53008994-44C0-4017-ad44-9c49758083da", func(o *Options) { o.SystemUUID = "53008994-44c0-4017-ad44-9c49758083da" }}},
		bad: []string{"53008994", "00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-ffff-ffff-ffffffffffff",
			"5300899444c04017ad449c49758083da",
			"53008994-44c0-4017-ad44-9c49758083da\n", "{53008994-44c0-4017-ad44-9c49758083da}"},
	},
	"firmware": {
		good: []field{
			{"bios", func(o *Options) { o.Firmware = FirmwareBIOS }},
			{"uefi", func(o *Options) { o.Firmware = FirmwareUEFI }},
		},
		bad: []string{"UEFI", "efi", "ovmf", "uefi\n"},
	},
	"image-medium": {
		good: []field{
			{"cdrom", func(o *Options) { o.ImageMedium = MediumCDROM }},
			{"disk", func(o *Options) { o.ImageMedium = MediumDisk }},
		},
		bad: []string{"iso", "CDROM", "floppy"},
	},
	"disk-driver": {
		good: []field{
			{"virtio", func(o *Options) { o.DiskBus = machine.BusVirtio }},
			{"scsi", func(o *Options) { o.DiskBus = machine.BusSCSI }},
		},
		bad: []string{"ide", "SCSI", "virtio,serial=x"},
	},
	"root-volume-size": {
		good: []field{
			{"1", func(o *Options) { o.RootVolumeSize = 512 }},
			{"512", func(o *Options) { o.RootVolumeSize = 512 }},
			{"513", func(o *Options) { o.RootVolumeSize = 1024 }},
			{"1Gi", func(o *Options) { o.RootVolumeSize = 1 << 30 }},
			{"1M", func(o *Options) { o.RootVolumeSize = 1_000_448 }},
			{"1.5Gi", func(o *Options) { o.RootVolumeSize = 3 << 29 }},
			{"512000m", func(o *Options) { o.RootVolumeSize = 512 }},
			{"1e6", func(o *Options) { o.RootVolumeSize = 1_000_448 }},
			{"10240E-1", func(o *Options) { o.RootVolumeSize = 1024 }},
			{"64Ti", func(o *Options) { o.RootVolumeSize = 64 << 40 }},
		},
		bad: []string{"0", "-1Gi", "1.1", "100m", "1GB", "1gi", "64.1Ti", "65Ti", "1E", "16Ei", "1e30", "1e999999999", "1e-3", "", " 1Gi", "1 Gi",
			"Gi", "NaN", strings.Repeat("9", 100)},
	},
	"root-device-overwrite": {
		good: []field{
			{"never", func(o *Options) { o.RootDeviceOverwrite = "never" }},
			{"foreign", func(o *Options) { o.RootDeviceOverwrite = "foreign" }},
			{"image", func(o *Options) { o.RootDeviceOverwrite = "image" }},
		},
		bad: []string{"true", "always", "Foreign", "image "},
	},
	"scratch-disks": {
		good: []field{
			{"/dev/scratch=10Gi", func(o *Options) { o.ScratchDisks = []ScratchDisk{{"/dev/scratch", 10 << 30}} }},
			{"/dev/a=1, /dev/b/c=1Mi\n/dev/d=513\n", func(o *Options) {
				o.ScratchDisks = []ScratchDisk{{"/dev/a", 512}, {"/dev/b/c", 1 << 20}, {"/dev/d", 1024}}
			}},
		},
		bad: []string{"/dev/a", "/dev/a=", "/dev/a=0", "10Gi", "a=1Gi", "/a=1Gi", "/dev/../a=1Gi", "/dev/a/=1Gi", "/dev/a=1Gi,/dev/a=2Gi",
			"/dev/a b=1Gi",
			"/dev/a=65Ti", strings.Repeat("/dev/a=1Gi,", 2), "/dev/1=1,/dev/2=1,/dev/3=1,/dev/4=1,/dev/5=1,/dev/6=1,/dev/7=1,/dev/8=1,/dev/9=1"},
	},
	"share-driver": {
		good: []field{
			{"virtiofs", func(o *Options) { o.ShareDriver = machine.ShareVirtiofs }},
			{"9p", func(o *Options) { o.ShareDriver = machine.Share9p }},
			{"9p-mapped", func(o *Options) { o.ShareDriver = machine.Share9pMapped }},
		},
		bad: []string{"9pfs", "virtio-fs", "VirtioFS", "true"},
	},
	"chown-9pfs-mounts": booleanCase(func(o *Options) *bool { return &o.Chown9pfs }),
	"cloud-init-image-type": {
		good: []field{
			{"nocloud", func(o *Options) { o.ImageType = NoCloud }},
			{"ConfigDrive", func(o *Options) { o.ImageType = ConfigDrive }},
		},
		bad: []string{"ec2", "no-cloud"},
	},
	"cloud-init-meta-data": mappingCase(func(o *Options) *map[string]any { return &o.MetaData },
		[]field{{"content-type: a/b", func(o *Options) { o.MetaData = map[string]any{"content-type": "a/b"} }}},
		"#include\nhttp://x/", "#!/bin/sh\n# x", "## template: jinja\na: b", "## Template:jinja\na: b", "#cloud-config-archive\n- a",
		"MIME-Version: 1.0\na: b"),
	"cloud-init-user-data":           mappingCase(func(o *Options) *map[string]any { return &o.UserData }, goodDocuments(), badDocuments...),
	"cloud-init-user-data-overwrite": booleanCase(func(o *Options) *bool { return &o.UserDataOverwrite }),
	"cloud-init-user-data-script": {
		good: []field{{"#!/bin/sh\necho hi\n", func(o *Options) { o.UserDataScript = "#!/bin/sh\necho hi\n" }}},
		bad:  []string{strings.Repeat("x", maxText+1)},
	},
	"cloud-init-user-data-source": sourceCase(func(o *Options) *Source { return &o.UserDataSource }, "secret/a/b"),
	"cloud-init-user-data-source-key": {
		good: []field{{"user-data.yaml", func(o *Options) { o.UserDataSourceKey = "user-data.yaml" }}},
		bad:  []string{"a/b", "..", "..data", ".", "a b", strings.Repeat("x", 254)},
	},
	"cloud-init-user-data-source-encoding": {
		good: []field{
			{"plain", func(*Options) {}},
			{"base64", func(o *Options) { o.UserDataSourceEncoding = EncodingBase64 }},
		},
		bad: []string{"b64", "Base64", "gzip"},
	},
	"ssh-keys": {
		good: []field{{"ssh-rsa AAAA me@a\r\n\n  # no key\n\tssh-ed25519 BBBB me@b",
			func(o *Options) { o.SSHKeys = []string{"ssh-rsa AAAA me@a", "ssh-ed25519 BBBB me@b"} }}},
		bad: []string{"ssh-rsa A\x00A", "ssh-rsa \xff", strings.Repeat("x", maxSSHKeyLine+1), strings.Repeat("a\n", maxText)},
	},
	"ssh-key-source":            sourceCase(func(o *Options) *Source { return &o.SSHKeySource }),
	"files-from-data-source":    sourceCase(func(o *Options) *Source { return &o.FilesSource }, "secret/a/b"),
	"force-dhcp-network-config": booleanCase(func(o *Options) *bool { return &o.ForceDHCP }),
	"wait-for-agent":            booleanCase(func(o *Options) *bool { return &o.WaitForAgent }),
	"vnc":                       booleanCase(func(o *Options) *bool { return &o.VNC }),
	"template": {
		good: []field{{"cloud-init", func(o *Options) { o.Template = TemplateCloudInit }}},
		bad:  []string{"true", "boot", "cloudinit"},
	},
}

type testCase = struct {
	good []field
	bad  []string
}

func booleanCase(f func(*Options) *bool) testCase {
	return testCase{
		good: []field{{"true", func(o *Options) { *f(o) = true }}, {"false", func(*Options) {}}},
		bad:  []string{"True", "yes", "1", "false "},
	}
}

func mappingCase(f func(*Options) *map[string]any, good []field, bad ...string) testCase {
	return testCase{
		good: append(good, []field{
			{"#cloud-config\na: [x, 12345678901234567890]\n", func(o *Options) {
				*f(o) = map[string]any{"a": []any{"x", json.Number("12345678901234567890")}}
			}},
			{`{"a": {"b": true}}`, func(o *Options) { *f(o) = map[string]any{"a": map[string]any{"b": true}} }},
			{"\ufeff \n#Cloud-Config\n---\na: '\\ufffd \ufffd'\n---\n", func(o *Options) { *f(o) = map[string]any{"a": "\\ufffd \ufffd"} }},
			{"# nothing\n", func(*Options) {}},
		}...),
		bad: append(bad, "- a", "text", "a: [", "a: 1\na: 2", "a: &x [*x]", strings.Repeat("# x\n", maxText), "a: b\n---\nc: d",
			"#c\n---\n---\na: b", "a: b\n---\n[",
			"a: !!binary /wAB"),
	}
}

// goodDocuments are user-data in all forms but a mapping.
func goodDocuments() (good []field) {
	for text, want := range map[string]Document{
		"#include\nhttp://x/\n":                        {ContentType: "text/x-include-url", Configures: true},
		"\n #INCLUDE http://x/":                        {ContentType: "text/x-include-url", Configures: true},
		"#include-once http://x/\n":                    {ContentType: "text/x-include-once-url", Configures: true},
		"#!/bin/sh\n# nothing":                         {ContentType: "text/x-shellscript"},
		"#cloud-boothook\n#!/bin/sh\n":                 {ContentType: "text/cloud-boothook"},
		"#part-handler\nimport os\n":                   {ContentType: "text/part-handler"},
		"#cloud-config-archive\n- content: x\n":        {ContentType: "text/cloud-config-archive", Configures: true},
		"#cloud-config-jsonp\n[]\n":                    {ContentType: "text/cloud-config-jsonp"},
		"## template: jinja\n#cloud-config\na: {{b}}":  {ContentType: "text/jinja2", Configures: true},
		"## Template: Jinja \r\n{% if a %}\n#!/bin/sh": {ContentType: "text/jinja2", Configures: true},
		"Content-Type: multipart/mixed; boundary=x\nMIME-Version: 1.0\n\n--x\n\na\n--x--\n": {Configures: true},
		"MIME-Version: 1.0\nContent-Type: text/cloud-config\n\na: b\n":                      {Configures: true},
		"Subject: x\nmime-version: 1.0\ncontent-type: text/x-shellscript\n\n#!/bin/sh\n":    {Configures: true},
	} {
		want.Text = text
		good = append(good, field{text, func(o *Options) { o.UserDataDocument = want }})
	}
	return good
}

// badDocuments are user-data that cloud-init would ignore, or read as something else than they seem to be.
var badDocuments = []string{
	"## template: jinja2\n#cloud-config\na: b", "##template: jinja\na: b", "\n## template: jinja\na: b", "## template: basic\na: b",
	"## template: jinja\n#include\nhttp://x/", "## template: jinja\n#cloud-config-archive\n- a", "## template: jinja\nMIME-Version: 1.0\n\n",
	"\n#!/bin/sh\n", " #cloud-boothook\n#!/bin/sh\n", "\ufeff#include\nhttp://x/", "\ufeff#!/bin/sh",
	"H4sIAAAAAAAAA0vOyS9N0U3Oz0vLTOcCAGhQZ2sOAAAA",
	"Content-Type: multipart/mixed; boundary=x\n\n--x\n", "Content-Type: multipart/mixed\nMIME-Version: 1.0\n\n--x\n",
	"MIME-Version: 1.0\n\na: b",
	"Content-Type: multipart/mixed; boundary=x\nMIME-Version: 1.0\n\n--y\n", "\nContent-Type: text/cloud-config\nMIME-Version: 1.0\n\na: b",
	"MIME-Version: 1.0\nno header",
	"#!" + strings.Repeat("x", maxText),
}

func sourceCase(f func(*Options) *Source, more ...string) testCase {
	name := strings.Repeat("x", 253)
	good := []field{
		{"configmap/a-b.c", func(o *Options) { *f(o) = Source{Kind: "configmap", Name: "a-b.c"} }},
		{"secret/" + name, func(o *Options) { *f(o) = Source{Kind: "secret", Name: name} }},
	}
	if more == nil {
		good[0].want = func(o *Options) { *f(o) = Source{Kind: "configmap", Name: "a-b.c", Key: "authorized_keys"} }
		good[1] = field{"secret/k/keys.pub", func(o *Options) { *f(o) = Source{Kind: "secret", Name: "k", Key: "keys.pub"} }}
	}
	return testCase{good: good,
		bad: append([]string{"a", "volume/a", "secret/", "secret/A", "secret/../a", "secret/..", "secret/x" + name, "secret/a/..data",
			"secret/a/b/c"}, more...)}
}

func defaults() Options {
	return Options{VCPUs: 1, DiskBus: machine.BusVirtio, ImageType: NoCloud, UserDataSourceEncoding: EncodingPlain}
}

func TestEveryAnnotation(t *testing.T) {
	for _, a := range Known {
		c, ok := cases[a.Name]
		if !ok {
			t.Errorf("%s has no cases", a.Key())
		}
		for _, key := range []string{a.Virtlet, a.Key()} {
			if key == "" {
				continue
			}
			t.Run(key, func(t *testing.T) {
				for _, g := range c.good {
					want := defaults()
					g.want(&want)
					o, _, err := Parse(companions(a, key, g.value))
					if a.Name == "cloud-init-user-data-source-key" {
						want.UserDataSource = Source{Kind: "secret", Name: "s"}
					}
					if err != nil || !reflect.DeepEqual(o, want) {
						t.Errorf("Parse(%q) = %+v, %v; want %+v", g.value, o, err, want)
					}
				}
				for _, value := range c.bad {
					if value == "" {
						continue
					}
					_, _, err := Parse(companions(a, key, value))
					if !errdefs.IsInvalidArgument(err) {
						t.Fatalf("Parse(%.100q) error = %v, want ErrInvalidArgument", value, err)
					}
					for _, part := range []string{key, shown(value), a.Allowed} {
						if !strings.Contains(err.Error(), part) {
							t.Errorf("Parse(%.100q) error = %v, want one with %q", value, err, part)
						}
					}
				}
			})
		}
	}
	if len(cases) != len(Known) {
		t.Errorf("%d annotations have cases, want %d", len(cases), len(Known))
	}
}

// companions returns annotations with the key, the other annotations that it requires, and an unrelated one.
func companions(a *Annotation, key, value string) map[string]string {
	all := map[string]string{key: value, "other.example/key": "x"}
	if a.Name == "cloud-init-user-data-source-key" {
		all[Prefix+"cloud-init-user-data-source"] = "secret/s"
	}
	return all
}

func TestNothingGiven(t *testing.T) {
	all := map[string]string{"kubernetes.io/target-runtime": "virtlet.cloud", "virtlet": "x", "tripod.dev/vm": "x"}
	for _, a := range Known {
		all[a.Key()] = ""
	}
	o, warnings, err := Parse(all)
	if err != nil || len(warnings) > 0 || !reflect.DeepEqual(o, defaults()) {
		t.Errorf("Parse = %+v, %q, %v; want the defaults", o, warnings, err)
	}
}

func TestBothNames(t *testing.T) {
	same := map[string]string{"VirtletVCPUCount": "2", "tripod.dev/vm.vcpu-count": "2"}
	if o, _, err := Parse(same); err != nil || o.VCPUs != 2 {
		t.Errorf("Parse of the same value under both names = %+v, %v; want 2 CPUs", o, err)
	}
	same["VirtletVCPUCount"] = "3"
	_, _, err := Parse(same)
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `tripod.dev/vm.vcpu-count: "2" and VirtletVCPUCount: "3"`) {
		t.Errorf("Parse of two values: error = %v, want ErrInvalidArgument with both", err)
	}
}

func TestWarnings(t *testing.T) {
	for name, c := range map[string]struct {
		all  map[string]string
		want []string
	}{
		"unknown keys": {
			map[string]string{"VirtletVCPUcount": "2", "VirtletSSHKey": ""},
			[]string{
				`annotation "VirtletSSHKey" is unknown; did you mean VirtletSSHKeys?`,
				`annotation "VirtletVCPUcount" is unknown; did you mean VirtletVCPUCount?`,
			},
		},
		"a template that would keep a secret": {
			map[string]string{"tripod.dev/vm.template": "cloud-init", "VirtletCloudInitUserDataSource": "secret/s"},
			[]string{"annotation tripod.dev/vm.template has no effect: a template would keep what VirtletCloudInitUserDataSource names"},
		},
		"a template of the same instance": {
			map[string]string{"tripod.dev/vm.template": "cloud-init", "VirtletCloudInitMetaData": "instance-id: x"},
			[]string{"annotation tripod.dev/vm.template has no effect: with the instance-id in VirtletCloudInitMetaData, a copy would be no new instance for cloud-init"},
		},
		"a script and more": {
			map[string]string{"VirtletCloudInitUserDataScript": "#!/bin/sh\n", "VirtletCloudInitUserData": "a: b",
				"VirtletCloudInitUserDataSource": "secret/s"},
			[]string{
				"annotation VirtletCloudInitUserDataSource has no effect: VirtletCloudInitUserDataScript is the whole user data",
				"annotation VirtletCloudInitUserData has no effect: VirtletCloudInitUserDataScript is the whole user data",
			},
		},
		"a script and a document": {
			map[string]string{"VirtletCloudInitUserDataScript": "#!/bin/sh\n", "VirtletCloudInitUserData": "#include\n"},
			[]string{"annotation VirtletCloudInitUserData has no effect: VirtletCloudInitUserDataScript is the whole user data"},
		},
		"a key and a script": {
			map[string]string{"VirtletCloudInitUserDataScript": "#!/bin/sh\n", "VirtletCloudInitUserDataSource": "secret/s",
				"VirtletCloudInitUserDataSourceKey": "k"},
			[]string{"annotation VirtletCloudInitUserDataScript has no effect: the user data comes from VirtletCloudInitUserDataSourceKey"},
		},
		"an encoding without a key": {
			map[string]string{"VirtletCloudInitUserDataSourceEncoding": "base64"},
			[]string{"annotation VirtletCloudInitUserDataSourceEncoding has no effect: it applies to the value under tripod.dev/vm.cloud-init-user-data-source-key, which is missing"},
		},
		"owners": {
			map[string]string{"VirtletChown9pfsMounts": "true"},
			[]string{"annotation VirtletChown9pfsMounts has no effect: owners in shared directories are mapped, not changed"},
		},
		"two CPUs": {
			map[string]string{"tripod.dev/vm.cpu-model": "host-model", "VirtletLibvirtCPUSetting": "Mode: host-model"},
			[]string{"annotation tripod.dev/vm.cpu-model has no effect: VirtletLibvirtCPUSetting defines the whole CPU"},
		},
	} {
		_, warnings, err := Parse(c.all)
		if err != nil || !slices.Equal(warnings, c.want) {
			t.Errorf("%s: warnings = %q, %v; want %q", name, warnings, err, c.want)
		}
	}
	many := map[string]string{}
	for i := range 1000 {
		many[fmt.Sprintf("%s%03d%s", VirtletPrefix, i, strings.Repeat("x", 10_000))] = "x"
	}
	if _, warnings, err := Parse(many); err != nil || len(warnings) != maxUnknown+1 ||
		warnings[maxUnknown] != "980 more annotations are unknown" {
		t.Errorf("a thousand unknown keys give %d warnings, %v; want %d", len(warnings), err, maxUnknown+1)
	}
	for key, meant := range map[string]string{"vcpu-cound": "vcpu-count", "disk_driver": "disk-driver"} {
		_, _, err := Parse(map[string]string{Prefix + key: "2"})
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "did you mean "+Prefix+meant) {
			t.Errorf("Parse of %s = %v, want ErrInvalidArgument that suggests %s", key, err, meant)
		}
	}
}

func TestKeyWithoutSource(t *testing.T) {
	_, _, err := Parse(map[string]string{"VirtletCloudInitUserDataSourceKey": "k"})
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `VirtletCloudInitUserDataSourceKey: "k"`) {
		t.Errorf("Parse error = %v, want ErrInvalidArgument with the key", err)
	}
}

// TestDocumentAndSource: only the guest can read a document, so a source's keys cannot be merged with the keys in it.
func TestDocumentAndSource(t *testing.T) {
	all := map[string]string{Prefix + "cloud-init-user-data": "#include\nhttp://x/", "VirtletCloudInitUserDataSource": "secret/s"}
	_, _, err := Parse(all)
	for _, word := range []string{Prefix + "cloud-init-user-data:", "VirtletCloudInitUserDataSource ",
		Prefix + "cloud-init-user-data-overwrite", Prefix + "cloud-init-user-data-source-key"} {
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), word) {
			t.Errorf("Parse error = %v, want ErrInvalidArgument with %q", err, word)
		}
	}
	for key, value := range map[string]string{"VirtletCloudInitUserDataOverwrite": "true", Prefix + "cloud-init-user-data": "#!/bin/sh",
		"VirtletCloudInitUserDataSourceKey": "k"} {
		changed := maps.Clone(all)
		changed[key] = value
		if _, _, err := Parse(changed); err != nil {
			t.Errorf("Parse with %s = %q: %v", key, value, err)
		}
	}
}

func TestUserDataIsNotInMessages(t *testing.T) {
	_, _, err := Parse(map[string]string{"VirtletCloudInitMetaData": "- password\n- hunter2\n"})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("Parse error = %v, want one without the value", err)
	}
}

// FuzzParse finds values for which Parse panics or takes long, errors that name no key, and options out of range.
func FuzzParse(f *testing.F) {
	for _, a := range Known {
		for _, g := range cases[a.Name].good {
			f.Add(a.Name, g.value, a.Name, g.value)
		}
		for _, b := range cases[a.Name].bad {
			f.Add(a.Name, b[:min(len(b), 200)], "x", "y")
		}
	}
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2 string) {
		all := map[string]string{Prefix + name1: value1, VirtletPrefix + name2: value2}
		for _, a := range Known {
			if a.Name == name2 && a.Virtlet != "" {
				all[a.Virtlet] = value2
			}
		}
		o, _, err := Parse(all)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) || !slices.ContainsFunc(slices.Collect(maps.Keys(all)), func(key string) bool {
				return strings.Contains(err.Error(), key) || strings.Contains(err.Error(), strconv.Quote(key))
			}) {
				t.Fatalf("Parse(%q) error = %v, want ErrInvalidArgument with a key", all, err)
			}
			return
		}
		if o.VCPUs < 1 || o.VCPUs > maxVCPUs || o.RootVolumeSize > maxRootVolume || o.RootVolumeSize%sectorSize != 0 {
			t.Fatalf("Parse(%q) = %+v, out of range", all, o)
		}
		if _, err := json.Marshal([]any{o.MetaData, o.UserData}); err != nil {
			t.Fatalf("Parse(%q): the data is not JSON: %v", all, err)
		}
	})
}
