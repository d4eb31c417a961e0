package vmwrap

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
)

func one(n int) *int { return &n }

// domain is an abridged command line of libvirt 9.0.
var domain = []string{"/e/qemu", "-name", "guest=x",
	"-kernel", "/p/kernel", "-initrd", "/p/initrd",
	"-chardev", "socket,id=charmonitor,fd=25,server=on,wait=off",
	"-blockdev", `{"driver":"file","filename":"/p/root.base","node-name":"libvirt-2-storage","auto-read-only":true,"discard":"unmap"}`,
	"-blockdev", `{"node-name":"libvirt-2-format","read-only":true,"driver":"raw","file":"libvirt-2-storage"}`,
	"-blockdev", `{"driver":"file","filename":"/p/root","node-name":"libvirt-1-storage","auto-read-only":true,"discard":"unmap"}`,
	"-fsdev", "local,security_model=mapped,id=fsdev-fs0,path=/p/share0,readonly=on",
	"-chardev", "socket,id=chr-vu-fs1,path=/p/share1",
	"-chardev", "null,id=charserial0", "-chardev", "null,id=charserial1", "-chardev", "null,id=charchannel0",
	"-vnc", "vnc=unix:/p/vnc/vnc.sock,audiodev=audio1",
}

func TestEdit(t *testing.T) {
	g := Grant{
		Files:    []File{{Path: "/p/root", FDs: []int{0, 1}}, {Path: "/p/root.base", FDs: []int{2}}},
		Plain:    []Plain{{"/p/kernel", 3}, {"/p/initrd", 4}, {"/p/share0", 5}, {"/p/vnc", 12}},
		Sockets:  []Plain{{"/p/share1", 13}},
		Serial:   &Serial{ID: "charserial0", Input: 6, Output: 7},
		Chardevs: []Chardev{{ID: "charchannel0", Socket: 8}},
		Rings:    []Ring{{ID: "charserial1", Size: 65536}},
		NICs:     []NIC{{MAC: "02:00:00:00:00:01", MTU: 1500, Tap: 9}, {MAC: "02:00:00:00:00:02", MTU: 1400, Tap: 10, VHost: one(11)}},
	}
	fds := []int{30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43}
	got, err := edit(domain, g, fds)
	require.NoError(t, err)
	require.Equal(t, []string{"/e/qemu", "-name", "guest=x",
		"-kernel", "/proc/self/fd/33", "-initrd", "/proc/self/fd/34",
		"-chardev", "socket,id=charmonitor,fd=25,server=on,wait=off",
		"-blockdev", `{"auto-read-only":true,"discard":"unmap","driver":"file","filename":"/dev/fdset/1001","node-name":"libvirt-2-storage"}`,
		"-blockdev", `{"node-name":"libvirt-2-format","read-only":true,"driver":"raw","file":"libvirt-2-storage"}`,
		"-blockdev", `{"auto-read-only":true,"discard":"unmap","driver":"file","filename":"/dev/fdset/1000","node-name":"libvirt-1-storage"}`,
		"-fsdev", "local,security_model=mapped,id=fsdev-fs0,path=/proc/self/fd/35,readonly=on",
		"-chardev", "socket,id=chr-vu-fs1,fd=43",
		"-chardev", "stdio,id=charserial0,signal=off",
		"-chardev", "ringbuf,id=charserial1,size=65536",
		"-chardev", "socket,id=charchannel0,fd=38,server=on,wait=off",
		"-vnc", "vnc=unix:/proc/self/fd/42/vnc.sock,audiodev=audio1",
		"-add-fd", "set=1000,fd=30", "-add-fd", "set=1000,fd=31", "-add-fd", "set=1001,fd=32",
		"-netdev", "tap,id=tripod0,fd=39", "-device",
		"virtio-net-pci,netdev=tripod0,id=net-tripod0,mac=02:00:00:00:00:01,bus=pcie.0,addr=0x10,romfile=",
		"-netdev", "tap,id=tripod1,fd=40,vhost=on,vhostfd=41",
		"-device", "virtio-net-pci,netdev=tripod1,id=net-tripod1,mac=02:00:00:00:00:02,bus=pcie.0,addr=0x11,romfile=,host_mtu=1400",
	}, got)
}

// TestEditRefuses: edit refuses a grant that does not match the domain.
func TestEditRefuses(t *testing.T) {
	for name, g := range map[string]Grant{
		"no such disk":      {Files: []File{{Path: "/p/other", FDs: []int{0}}}},
		"no such kernel":    {Plain: []Plain{{"/p/other", 0}}},
		"no such device":    {Chardevs: []Chardev{{ID: "charserial2"}}},
		"no such console":   {Serial: &Serial{ID: "charserial2"}},
		"no such port":      {Rings: []Ring{{ID: "charserial2", Size: 65536}}},
		"no such socket":    {Sockets: []Plain{{"/p/other", 0}}},
		"listening socket":  {Sockets: []Plain{{"charmonitor", 0}}},
		"not a null device": {Chardevs: []Chardev{{ID: "charmonitor"}}},
		"no such fd":        {NICs: []NIC{{Tap: 1}}},
		"a negative fd":     {Files: []File{{Path: "/p/root", FDs: []int{-1}}}},
		"too many NICs":     {NICs: make([]NIC, MaxNICs+1)},
	} {
		_, err := edit(domain, g, []int{30})
		require.ErrorIs(t, err, errdefs.ErrFailedPrecondition, name)
	}
}

// TestPrepareProbe: without a machine's name, prepare changes nothing.
func TestPrepareProbe(t *testing.T) {
	env := []string{"PATH=/bin", "HOME=/"}
	emulator, argv, environ, err := prepare(t.Context(), []string{"/e/tripod-vmwrap", "-S", "-machine", "none"}, env)
	require.NoError(t, err)
	require.Equal(t, "/e/qemu", emulator)
	require.Equal(t, []string{"/e/qemu", "-S", "-machine", "none"}, argv)
	require.Equal(t, env, environ)
	_, _, _, err = prepare(t.Context(), []string{"tripod-vmwrap"}, env)
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	_, _, _, err = prepare(t.Context(), []string{"/e/tripod-vmwrap"}, append(env, MachineVar+"=x", SocketVar+"=/none/s"))
	require.ErrorIs(t, err, errdefs.ErrUnavailable)
}

// FuzzEdit: edit never panics, and an empty grant changes nothing.
func FuzzEdit(f *testing.F) {
	f.Add("-blockdev", `{"filename":"/p/root"}`, "/p/root", 0)
	f.Add("-fsdev", `local,path=/p`, "/p", 0)
	f.Add("-chardev", `null,id=x`, "x", 7)
	f.Fuzz(func(t *testing.T, option, value, path string, fd int) {
		args := []string{"/e/qemu", option, value, "-kernel"}
		for _, g := range []Grant{{Files: []File{{Path: path, FDs: []int{fd}}}}, {Plain: []Plain{{path, fd}}},
			{Chardevs: []Chardev{{ID: path, Socket: fd}}}} {
			if got, err := edit(args, g, []int{3}); err == nil && (len(got) < len(args) || got[1] != option) {
				t.Fatalf("edit(%q) = %q, which lost an argument", args, got)
			}
		}
		if got, err := edit(args, Grant{}, nil); err != nil || len(got) != len(args) {
			t.Fatalf("edit with an empty grant = %q, %v; want %q", got, err, args)
		}
	})
}
