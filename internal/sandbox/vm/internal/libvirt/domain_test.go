package libvirt

import (
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
)

var update = flag.Bool("update", false, "write the golden files in testdata")

// plainDriver returns a driver without libvirtd.
func plainDriver(accel string) *Driver {
	return &Driver{
		cfg:    Config{Owner: "/var/lib/tripod", Accel: accel},
		layout: layout{dir: "/run/tripod/vm-libvirt", emulator: "/run/tripod/vm-libvirt/emulator-0123456789ab/tripod-vmwrap"},
	}
}

const testName = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func minimal() machine.Definition {
	return machine.Definition{
		Name: testName, UUID: "01234567-89ab-cdef-0123-456789abcdef", Dir: "/run/tripod/vm/x", StateDir: "/var/lib/tripod/vm/x",
		CPUs: 1, Memory: 128 << 20, SerialLog: "/var/lib/tripod/vm/x/serial.log", UID: 200001, GID: 200001, Cgroup: "/tripod/x",
		Disks: []machine.Disk{{
			ID: "root", File: machine.File{Path: "/var/lib/tripod/vm/x/root.qcow2"}, Format: "qcow2", Bus: machine.BusVirtio,
			Base: &machine.Base{File: machine.File{Path: "/var/lib/tripod/base"}, Format: "raw"},
		}},
	}
}

func everything() machine.Definition {
	d := minimal()
	d.CPUs, d.CPUModel, d.VNC = 4, "Nehalem", true
	d.Kernel, d.Initrd, d.Cmdline = &machine.File{Path: "/k"}, &machine.File{Path: "/i"}, `console=ttyS0 x="<&>"`
	d.Disks = append(d.Disks,
		machine.Disk{ID: "cidata", File: machine.File{Path: "/c"}, Format: "raw", ReadOnly: true, Bus: machine.BusVirtio},
		machine.Disk{ID: "data", File: machine.File{Path: "/dev/sdx"}, Format: "raw", Bus: machine.BusSCSI, LogicalBlock: 512,
			PhysicalBlock: 4096},
		machine.Disk{ID: "part", File: machine.File{Path: "/dev/sdy"}, Format: "raw", Offset: 1 << 20, Size: 7 << 20, Bus: machine.BusVirtio})
	d.NICs = []machine.NIC{{MAC: "02:00:00:00:00:01", MTU: 1400, Netns: "/run/netns/x", Tap: "tap0"}}
	d.Shares = []machine.Share{
		{Tag: "code", Path: "/srv/code", Driver: machine.Share9p, ReadOnly: true},
		{Tag: "scratch", Path: "/srv/scratch", Driver: machine.Share9pMapped},
		{Tag: "db", Path: "/srv/db", Driver: machine.ShareVirtiofs},
	}
	return d
}

// TestDomainXML compares domains with golden files; -update writes them.
func TestDomainXML(t *testing.T) {
	withCPU := minimal()
	withCPU.LibvirtCPU = `<cpu mode='custom' match='exact'><model>core2duo</model><feature name='vmx' policy='disable'/></cpu>`
	byUEFI := minimal()
	byUEFI.UEFI = &machine.UEFI{Code: machine.File{Path: "/code.fd"}, Vars: machine.FilePart{File: machine.File{Path: "/vars.fd"}}}
	fromCD := minimal()
	fromCD.Disks = []machine.Disk{
		{ID: "cdrom", File: machine.File{Path: "/var/lib/tripod/base"}, Format: "raw", ReadOnly: true, Bus: machine.BusCDROM},
		{ID: "scratch0", File: machine.File{Path: "/s"}, Format: "qcow2", Bus: machine.BusSCSI},
		{ID: "cidata", File: machine.File{Path: "/c"}, Format: "raw", ReadOnly: true, Bus: machine.BusSCSI},
	}
	for name, c := range map[string]struct {
		accel, secret, model string
		def                  machine.Definition
	}{
		"minimal":     {qemu.AccelTCG, "", "none", minimal()},
		"everything":  {qemu.AccelTCG, "a secret", "none", everything()},
		"libvirt-cpu": {qemu.AccelTCG, "", "none", withCPU},
		"uefi":        {qemu.AccelTCG, "", "none", byUEFI},
		"cdrom":       {qemu.AccelTCG, "", "none", fromCD},
		"kvm":         {qemu.AccelKVM, "", "apparmor", minimal()},
	} {
		t.Run(name, func(t *testing.T) {
			d := plainDriver(c.accel)
			require.NoError(t, d.validate(c.def))
			got, err := d.domainXML(c.def, c.secret, c.model)
			require.NoError(t, err)
			// With KVM the group can be that of this host's /dev/kvm.
			got = strings.ReplaceAll(got, fmt.Sprintf("+200001:+%d<", d.group(c.def)), "+200001:+200001<")
			file := filepath.Join("testdata", name+".xml")
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got+"\n"), 0o644))
			}
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, string(want), got+"\n")
			for _, path := range []string{"/var/lib/tripod/base", "tap0", "/dev/sdx", "/srv/"} {
				require.NotContains(t, withoutMetadata(t, got), path, "the domain must not contain our paths or the network")
			}
		})
	}
}

func withoutMetadata(t *testing.T, text string) string {
	before, rest, found := strings.Cut(text, "<metadata>")
	require.True(t, found)
	_, after, found := strings.Cut(rest, "</metadata>")
	require.True(t, found)
	return before + after
}

// TestMark: the mark in the domain's XML decodes to the definition, whatever characters it contains.
func TestMark(t *testing.T) {
	def := everything()
	text, err := plainDriver(qemu.AccelTCG).domainXML(def, "", "none")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(text, "<metadata>")
	inner, _, _ := strings.Cut(rest, "</metadata>")
	var mark metadata
	require.NoError(t, xml.Unmarshal([]byte(inner), &mark))
	require.Equal(t, "/var/lib/tripod", mark.Owner)
	require.Equal(t, xml.Name{Space: metadataURI, Local: "machine"}, mark.XMLName)
	require.Contains(t, mark.Definition, `console=ttyS0 x=\"\u003c\u0026\u003e\"`)
}

func TestValidate(t *testing.T) {
	d := plainDriver(qemu.AccelTCG)
	for name, change := range map[string]func(*machine.Definition){
		"other element": func(d *machine.Definition) { d.LibvirtCPU = "<memory/>" },
		"not XML":       func(d *machine.Definition) { d.LibvirtCPU = "<cpu" },
		"too many NICs": func(d *machine.Definition) { d.NICs = make([]machine.NIC, 9) },
		"no CPUs":       func(d *machine.Definition) { d.CPUs = 0 },
	} {
		def := minimal()
		change(&def)
		require.ErrorIs(t, d.validate(def), errdefs.ErrInvalidArgument, name)
	}
}

func TestTargetNames(t *testing.T) {
	for n, want := range map[int]string{0: "vda", 25: "vdz", 26: "vdaa", 51: "vdaz", 52: "vdba", 701: "vdzz", 702: "vdaaa"} {
		require.Equal(t, want, targetName(machine.BusVirtio, n).Dev)
	}
	require.Equal(t, "sdb", targetName(machine.BusSCSI, 1).Dev)
}

// TestClassify: classify keeps libvirt's message and adds a class.
func TestClassify(t *testing.T) {
	for number, class := range map[golibvirt.ErrorNumber]error{
		golibvirt.ErrNoDomain: errdefs.ErrNotFound, golibvirt.ErrOperationInvalid: errdefs.ErrFailedPrecondition,
		golibvirt.ErrXMLError: errdefs.ErrInvalidArgument, golibvirt.ErrDomExist: errdefs.ErrAlreadyExists,
		golibvirt.ErrRPC: errdefs.ErrUnavailable, golibvirt.ErrAccessDenied: errdefs.ErrPermissionDenied, 9999: errdefs.ErrInternal,
	} {
		err := classify("start domain x", golibvirt.Error{Code: uint32(number), Message: "the words"})
		require.ErrorIs(t, err, class)
		require.ErrorContains(t, err, "start domain x: libvirt: the words")
	}
	require.ErrorIs(t, classify("ask", golibvirt.ErrInterrupted), errdefs.ErrUnavailable)
	require.NoError(t, classify("ask", nil))
}

func TestURI(t *testing.T) {
	for uri, socket := range map[string]string{"qemu:///system": "", "qemu:///system?socket=/run/x": "/run/x",
		"qemu+unix:///system?socket=/y": "/y"} {
		l, err := newLink(uri, nil)
		require.NoError(t, err, uri)
		require.Equal(t, socket, l.socket)
	}
	for _, uri := range []string{"", "qemu:///session", "qemu+ssh://host/system", "xen:///system", "%"} {
		_, err := newLink(uri, nil)
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument, uri)
	}
}

// TestParseStats: parseStats assigns libvirt's parameters by the order of the disks.
func TestParseStats(t *testing.T) {
	p := func(field string, v any) golibvirt.TypedParam {
		return golibvirt.TypedParam{Field: field, Value: golibvirt.TypedParamValue{I: v}}
	}
	got := parseStats([]golibvirt.TypedParam{
		p("balloon.current", uint64(1024)), p("block.count", uint32(2)), p("block.0.name", "vda"), p("block.0.rd.bytes", uint64(7)),
		p("block.1.wr.reqs", uint64(8)), p("block.1.wr.bytes", int64(-1)), p("block.2.rd.bytes", uint64(9)), p("block.x.rd.bytes", uint64(9)),
	}, []machine.Disk{{ID: "root"}, {ID: "data"}})
	require.Equal(t, machine.Stats{Memory: 1 << 20, Blocks: map[string]machine.BlockStats{"root": {ReadBytes: 7}, "data": {WriteOps: 8}}}, got)
}
