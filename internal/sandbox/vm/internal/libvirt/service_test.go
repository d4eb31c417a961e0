package libvirt

import (
	"encoding/json"
	"os"
	"os/exec"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
)

// TestGrant: only the wrapper of a starting machine gets its files: as the right user, with the right secret, once.
func TestGrant(t *testing.T) {
	def := minimal()
	def.StateDir, def.Cgroup, def.UID = t.TempDir(), "", 200001
	sleeper := exec.Command("sleep", "60") // in place of the wrapper
	require.NoError(t, sleeper.Start())
	defer func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() }()
	peer := fdpass.Peer{PID: sleeper.Process.Pid, UID: 200001}
	fresh := func() (*Driver, *instance) {
		file, err := os.Open(os.DevNull)
		require.NoError(t, err)
		in := &instance{def: def,
			launch: &launch{secret: "right", files: []*os.File{file}, grant: vmwrap.Grant{Files: []vmwrap.File{{Path: "/p", FDs: []int{0}}}}}}
		return &Driver{machines: map[string]*instance{def.Name: in}}, in
	}
	ask := func(d *Driver, peer fdpass.Peer, r any) (fdpass.Reply, error) {
		raw, err := json.Marshal(r)
		require.NoError(t, err)
		return d.grant(t.Context(), peer, raw)
	}
	right := vmwrap.Request{Machine: def.Name, Secret: "right"}

	d, in := fresh()
	for what, c := range map[string]struct {
		peer    fdpass.Peer
		request vmwrap.Request
	}{
		"another user":    {fdpass.Peer{PID: peer.PID, UID: 200002}, right},
		"root":            {fdpass.Peer{PID: peer.PID, UID: 0}, right},
		"a wrong secret":  {peer, vmwrap.Request{Machine: def.Name, Secret: "wrong"}},
		"no secret":       {peer, vmwrap.Request{Machine: def.Name}},
		"another machine": {peer, vmwrap.Request{Machine: "x", Secret: "right"}},
	} {
		_, err := ask(d, c.peer, c.request)
		require.ErrorIs(t, err, errdefs.ErrPermissionDenied, what)
	}
	_, err := d.grant(t.Context(), peer, []byte("{"))
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)

	reply, err := ask(d, peer, right)
	require.NoError(t, err)
	require.Len(t, reply.Files, 1)
	fdpass.CloseFiles(reply.Files)
	require.Equal(t, peer.PID, in.run.Process.Pid)
	written, err := loadRun(def.StateDir)
	require.NoError(t, err)
	require.Equal(t, in.run.Process, written.Process, "the record must name QEMU's process before QEMU starts")
	_, err = ask(d, peer, right)
	require.ErrorIs(t, err, errdefs.ErrPermissionDenied, "second request")
	in.endStart()
	in.proc.Close()

	d, in = fresh()
	in.endStart()
	_, err = ask(d, peer, right)
	require.ErrorIs(t, err, errdefs.ErrPermissionDenied, "request after the start")
}

// TestReachable: checkReachable names a directory that other users cannot enter.
func TestReachable(t *testing.T) {
	dir := publicTemp(t)
	require.NoError(t, checkReachable(dir))
	require.NoError(t, os.Chmod(dir, 0o700))
	err := checkReachable(dir)
	require.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
	require.ErrorContains(t, err, dir)
}

func TestNewRefuses(t *testing.T) {
	dir := publicTemp(t)
	good := Config{Dir: dir, Owner: "x", Emulator: "/bin/true", Wrapper: "/bin/true", Accel: "tcg"}
	for class, damage := range map[error]func(*Config){
		errdefs.ErrNotFound:        func(c *Config) { c.Emulator = "no-such-emulator" },
		errdefs.ErrInvalidArgument: func(c *Config) { c.Accel = "auto" },
	} {
		cfg := good
		damage(&cfg)
		_, err := New(cfg)
		require.ErrorIs(t, err, class)
	}
	d, err := New(good)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
}

// TestRunRecord: loadRun returns what save wrote, and reports an unusable record.
func TestRunRecord(t *testing.T) {
	dir := t.TempDir()
	r, err := loadRun(dir)
	require.NoError(t, err)
	require.Equal(t, run{}, r)
	r = run{Boot: machine.BootID(), Killing: true, Ended: &machine.State{Phase: machine.Ended, Cause: machine.CauseOOM}}
	require.NoError(t, r.save(dir))
	again, err := loadRun(dir)
	require.NoError(t, err)
	r.Version = runVersion
	require.Equal(t, r, again)
	require.NoError(t, os.WriteFile(dir+"/"+runFile, []byte(`{"version":99}`), 0o600))
	_, err = loadRun(dir)
	require.ErrorIs(t, err, errdefs.ErrDataLoss)
	require.NoError(t, removeRun(dir))
	require.NoError(t, removeRun(dir))
}
