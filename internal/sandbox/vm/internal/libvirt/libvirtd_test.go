package libvirt

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// TestLibvirtdIsAway: without libvirtd, machines run and can be killed. Their ends are reported once it is back.
func TestLibvirtdIsAway(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	l := s.Begin(t)
	defer func() { l.Close() }()
	killed, off, stays, idle := s.Definition(t), s.Definition(t), s.Definition(t), s.Definition(t)
	consoles := map[string]*machinetest.Console{}
	for _, d := range []machine.Definition{killed, off, stays} {
		consoles[d.Name] = l.Boot(t, d)
	}
	require.NoError(t, l.Define(t.Context(), idle))

	require.NoError(t, l.Ready())
	r.Kill()
	require.Eventually(t, func() bool { return errdefs.IsUnavailable(l.Ready()) }, machinetest.Patience, 10*time.Millisecond,
		"Ready does not report that libvirtd is down")
	consoles[off.Name].Type("poweroff -f")
	for _, d := range []machine.Definition{killed, off, stays} {
		require.Equal(t, machine.Running, l.MustState(d.Name).Phase)
	}
	inTime(t, 10*time.Second, "shutdown", errdefs.ErrUnavailable, func() error { return l.Shutdown(t.Context(), stays.Name) })
	_, err := l.Stats(t.Context(), stays.Name)
	require.ErrorIs(t, err, errdefs.ErrUnavailable)
	inTime(t, 20*time.Second, "start", errdefs.ErrUnavailable, func() error { return l.Start(t.Context(), idle.Name) })
	require.Equal(t, machine.CauseStart, l.MustState(idle.Name).Cause)
	inTime(t, 10*time.Second, "destroy", nil, func() error { return l.Destroy(t.Context(), killed.Name) })
	require.Equal(t, machine.CauseKilled, l.End(killed.Name).Cause)
	inTime(t, 10*time.Second, "undefine", errdefs.ErrUnavailable, func() error { return l.Undefine(t.Context(), killed.Name) })

	r.Start()
	require.Equal(t, machine.CausePowerOff, l.End(off.Name).Cause)
	require.NoError(t, l.Ready())
	require.Equal(t, machine.Running, l.MustState(stays.Name).Phase)
	require.NoError(t, l.Shutdown(t.Context(), stays.Name))
	require.Equal(t, machine.CausePowerOff, l.End(stays.Name).Cause)
	require.NoError(t, l.Start(t.Context(), idle.Name), "start the machine that could not start before")
	require.NoError(t, l.Start(t.Context(), killed.Name), "start the killed machine again")

	// Restart both daemons. The ends are still known, from the records.
	require.NoError(t, l.Close())
	r.Restart()
	l = s.Begin(t, killed.Name, off.Name, stays.Name, idle.Name)
	require.Equal(t, machine.Running, l.Found[killed.Name].Phase)
	require.Equal(t, machine.Running, l.Found[idle.Name].Phase)
	require.Equal(t, machine.CausePowerOff, l.Found[off.Name].Cause)
	require.Equal(t, machine.CausePowerOff, l.Found[stays.Name].Cause)
	for _, d := range []machine.Definition{killed, off, stays, idle} {
		require.NoError(t, l.Undefine(t.Context(), d.Name))
	}
	require.Empty(t, entries(t, filepath.Join(r.cfg.Dir, "machines")), "placeholders remain")
}

// TestLibvirtdHangs: a libvirtd that does not answer blocks no call. Once it answers, abandoned starts are undone.
func TestLibvirtdHangs(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	l := s.Begin(t)
	defer l.Close()
	up, started := s.Definition(t), s.Definition(t)
	l.Boot(t, up)
	require.NoError(t, l.Define(t.Context(), started))

	r.Signal(syscall.SIGSTOP)
	require.Equal(t, machine.Running, l.MustState(up.Name).Phase)
	inTime(t, 3*time.Second, "stats", errdefs.ErrUnavailable, func() error { _, err := l.Stats(t.Context(), up.Name); return err })
	inTime(t, 10*time.Second, "shutdown", errdefs.ErrUnavailable, func() error { return l.Shutdown(t.Context(), up.Name) })
	inTime(t, 10*time.Second, "start", errdefs.ErrUnavailable, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return l.Start(ctx, started.Name)
	})
	inTime(t, 10*time.Second, "destroy", nil, func() error { return l.Destroy(t.Context(), up.Name) })
	require.Equal(t, machine.CauseKilled, l.End(up.Name).Cause)
	require.Eventually(t, func() bool { return errdefs.IsUnavailable(l.Ready()) }, machinetest.Patience, 100*time.Millisecond,
		"Ready does not report that libvirtd hangs")
	r.Signal(syscall.SIGCONT)
	require.Eventually(t, func() bool { return l.Ready() == nil }, machinetest.Patience, 100*time.Millisecond,
		"Ready does not report that libvirtd answers again")
	require.Eventually(t, func() bool { return l.Start(t.Context(), started.Name) == nil }, machinetest.Patience, 100*time.Millisecond)
	machinetest.AwaitLog(t, started, "TRIPOD-GUEST-READY", 1)
	for _, d := range []machine.Definition{up, started} {
		require.NoError(t, l.Undefine(t.Context(), d.Name))
	}
}

// TestConfined: QEMU runs as the machine's user, in its cgroup, cannot gain privileges, and does not get the secret.
func TestConfined(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	l.Boot(t, d)
	proc := filepath.Join("/proc", strconv.Itoa(l.MustState(d.Name).Pid))
	status := read(t, filepath.Join(proc, "status"))
	for _, want := range []string{"Uid:\t200001\t200001\t200001\t200001", "Gid:\t200002\t200002\t200002\t200002", "NoNewPrivs:\t1",
		"Seccomp:\t2", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"} {
		require.Contains(t, status, want)
	}
	require.NotContains(t, read(t, filepath.Join(proc, "environ")), "TRIPOD_")
	require.Contains(t, read(t, filepath.Join(proc, "limits")), "Max core file size        0                    0 ")
	require.True(t, l.Driver.(*Driver).inCgroup(l.MustState(d.Name).Pid, d.Cgroup), read(t, filepath.Join(proc, "cgroup")))
	require.NoError(t, l.Undefine(t.Context(), d.Name))
}

// TestOwners: daemons that share a libvirtd do not touch each other's machines.
func TestOwners(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	l.Boot(t, d)
	other := r
	other.cfg.Owner, other.cfg.Dir = "/another", r.cfg.Dir+"-another"
	second := other.subject(t).Begin(t)
	require.NoError(t, second.Close())
	require.Empty(t, second.Found)
	_, err := l.Stats(t.Context(), d.Name)
	require.NoError(t, err, "the first daemon's machine must still run")
	require.NoError(t, l.Undefine(t.Context(), d.Name))
}

// TestShares: the guest mounts directories by their tags, read-only ones included.
func TestShares(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	s.Guest = machinetest.FindGuest(t, true)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	d.Memory = 256 << 20
	for _, tag := range []string{"free", "locked"} {
		dir := filepath.Join(d.StateDir, tag)
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "hello"), []byte("from the host, "+tag+"\n"), 0o600))
		d.Shares = append(d.Shares, machine.Share{Tag: tag, Path: dir, Driver: machine.Share9p, ReadOnly: tag == "locked"})
	}
	mapped := filepath.Join(d.StateDir, "mapped")
	require.NoError(t, os.Mkdir(mapped, 0o755))
	d.Shares = append(d.Shares, machine.Share{Tag: "mapped", Path: mapped, Driver: machine.Share9pMapped})
	d.VNC = true
	console := l.Boot(t, d)
	console.Type("for t in free locked; do mkdir -p /mnt/$t; mount -t 9p -o trans=virtio,version=9p2000.L $t /mnt/$t; cat /mnt/$t/hello; echo of-$t >/mnt/$t/new; done; sync; echo shares-$((40+2))")
	machinetest.AwaitLog(t, d, "shares-42", 1)
	log := strings.ReplaceAll(read(t, d.SerialLog), "\r", "")
	require.Contains(t, log, "\nfrom the host, free\n")
	require.Contains(t, log, "\nfrom the host, locked\n")
	require.Equal(t, "of-free\n", read(t, filepath.Join(d.Shares[0].Path, "new")))
	require.NoFileExists(t, filepath.Join(d.Shares[1].Path, "new"))
	console.Type("%s", machinetest.MapOwners("mapped"))
	machinetest.CheckMapped(t, d, mapped)
	conn, err := unixsocket.Dial(t.Context(), filepath.Join(d.Dir, machine.VNCSocket))
	require.NoError(t, err)
	hello := make([]byte, 12)
	_, err = conn.Read(hello)
	require.NoError(t, err)
	conn.Close()
	require.Equal(t, "RFB 003.008\n", string(hello))
	require.NoError(t, l.Undefine(t.Context(), d.Name))
}

// TestLibvirtCPU: libvirt validates a user's <cpu> element.
func TestLibvirtCPU(t *testing.T) {
	r := newRig(t)
	s := r.subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	d.LibvirtCPU = `<cpu mode='custom' match='exact' check='none'><model fallback='forbid'>Nehalem</model><feature policy='disable' name='vmx'/></cpu>`
	bad := d
	bad.LibvirtCPU = `<cpu mode='no-such-mode'/>`
	err := l.Define(t.Context(), bad)
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	require.ErrorContains(t, err, "element cpu")
	console := l.Boot(t, d)
	console.Type("grep 'model name' /proc/cpuinfo")
	machinetest.AwaitLog(t, d, "Nehalem", 1)
	require.NoError(t, l.Undefine(t.Context(), d.Name))
}

// inTime checks that a call returns within limit, with an error of a class, or nil.
func inTime(t *testing.T, limit time.Duration, what string, class error, call func() error) {
	t.Helper()
	begun := time.Now()
	err := call()
	if class == nil {
		require.NoError(t, err, what)
	} else {
		require.ErrorIs(t, err, class, what)
	}
	require.Less(t, time.Since(begun), limit, what)
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(raw)
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// TestDoctor: Doctor reports what is missing, with a remedy.
func TestDoctor(t *testing.T) {
	r := newRig(t)
	cfg := r.cfg
	cfg.URI = r.URI
	for _, f := range Doctor(t.Context(), cfg) {
		require.True(t, f.OK, "%+v", f)
	}
	require.Contains(t, Doctor(t.Context(), cfg)[1].Detail, "libvirt ")
	r.Kill()
	cfg.Wrapper = "/no/such/wrapper"
	for _, f := range Doctor(t.Context(), cfg) {
		require.False(t, f.OK, "%+v", f)
		require.NotEmpty(t, f.Remedy)
	}
}
