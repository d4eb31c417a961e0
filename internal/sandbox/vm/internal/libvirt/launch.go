package libvirt

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
	"github.com/tripod-run/tripod/internal/stats"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// launch is a start in progress. It holds the files for the wrapper, which can request them only once.
type launch struct {
	secret  string
	grant   vmwrap.Grant
	files   []*os.File
	shares  *virtiofsd.Servers
	granted bool
}

// firmwareRing is libvirt's ID for the backend of the second serial port. The backend is the ring buffer with the
// firmware's output.
const firmwareRing = "charserial1"

// newLaunch opens all files of a machine. An error from the Opener keeps its class. Any other error without a class
// becomes errdefs.ErrFailedPrecondition.
func (d *Driver) newLaunch(ctx context.Context, def machine.Definition) (l *launch, err error) {
	l = &launch{secret: rand.Text()}
	defer func() {
		if err != nil {
			l.close()
			err = fmt.Errorf("open the files of machine %s: %w", def.Name, withClass(err))
		}
	}()
	if err := os.MkdirAll(def.Dir, 0o700); err != nil {
		return l, err
	}
	if def.Cgroup != "" { // otherwise libvirt chooses the cgroup
		if err := d.cfg.Cgroup.Joinable(def.Cgroup); err != nil {
			return l, err
		}
	}
	if err := d.layout.prepare(def); err != nil {
		return l, err
	}
	steps := []func(context.Context, *Driver, machine.Definition) error{l.openDisks, l.openPlain, l.openShares, l.openConsoles, l.openNICs}
	for _, step := range steps {
		if err := step(ctx, d, def); err != nil {
			return l, err
		}
	}
	return l, nil
}

func withClass(err error) error {
	for _, class := range fdpass.Classes() {
		if errors.Is(err, class) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
}

// close closes the files. It also ends the virtiofsd processes, unless grant has given them to the instance.
func (l *launch) close() {
	fdpass.CloseFiles(l.files)
	_ = l.shares.End(context.Background()) // End has a timeout; in any case, the processes end once their connections are closed
	l.files, l.shares = nil, nil
}

// add adds a file to the files for the wrapper and returns its index.
func (l *launch) add(f *os.File) int {
	l.files = append(l.files, f)
	return len(l.files) - 1
}

// openDisks opens disks, their bases and the flash memory of UEFI. A writable disk gets two descriptors, because libvirt makes
// QEMU open the disk twice: first read-only, then for writing when the guest's device is attached.
func (l *launch) openDisks(_ context.Context, d *Driver, def machine.Definition) error {
	for _, disk := range def.Disks {
		if err := l.openDisk(d.layout.placeholder(def.Name, disk.ID), disk.Path, disk.ReadOnly); err != nil {
			return err
		}
		if disk.Base == nil {
			continue
		}
		if err := l.openDisk(d.layout.placeholder(def.Name, disk.ID+baseSuffix), disk.Base.Path, true); err != nil {
			return err
		}
	}
	if def.UEFI == nil {
		return nil
	}
	return errors.Join(
		l.openDisk(d.layout.placeholder(def.Name, codeName), def.UEFI.Code.Path, true),
		l.openDisk(d.layout.placeholder(def.Name, varsName), def.UEFI.Vars.Path, false),
	)
}

func (l *launch) openDisk(placeholder, path string, readOnly bool) error {
	granted := vmwrap.File{Path: placeholder}
	for _, reading := range []bool{true, false} {
		if readOnly && !reading {
			break
		}
		file, device, err := qemu.OpenDisk(path, reading)
		if err != nil {
			return err
		}
		granted.FDs, granted.Device = append(granted.FDs, l.add(file)), device
	}
	l.grant.Files = append(l.grant.Files, granted)
	return nil
}

// openPlain opens the files that QEMU opens by path: kernel, initrd, 9p shares and the directory of the VNC socket.
func (l *launch) openPlain(_ context.Context, d *Driver, def machine.Definition) error {
	add := func(name string, file *os.File, err error) error {
		if err == nil {
			l.grant.Plain = append(l.grant.Plain, vmwrap.Plain{Path: d.layout.placeholder(def.Name, name), FD: l.add(file)})
		}
		return err
	}
	open := func(name string, f *machine.File) error {
		if f == nil {
			return nil
		}
		file, err := qemu.OpenBoot(f.Path)
		return add(name, file, err)
	}
	if err := errors.Join(open(kernelName, def.Kernel), open(initrdName, def.Initrd)); err != nil {
		return err
	}
	for i, s := range def.Shares {
		if !s.Driver.By9p() {
			continue
		}
		file, err := qemu.OpenShare(s.Path, s.ReadOnly, def.UID, def.GID)
		if err := add(shareName(i), file, err); err != nil {
			return err
		}
	}
	if !def.VNC {
		return nil
	}
	file, err := qemu.OpenOwned(filepath.Join(def.Dir, machine.VNCDir), def.UID, def.GID)
	return add(vncName, file, err)
}

// shareOptions returns the options of a machine's virtiofsd processes.
func (d *Driver) shareOptions(def machine.Definition) virtiofsd.Options {
	return virtiofsd.Options{
		Program: d.cfg.Virtiofsd, Dir: def.Dir, LogDir: def.StateDir, UID: def.UID, GID: def.GID, Tree: d.cfg.Cgroup, Cgroup: def.Cgroup,
	}
}

// openShares starts the virtiofsd processes and adds QEMU's end of each connection to the grant.
func (l *launch) openShares(ctx context.Context, d *Driver, def machine.Definition) (err error) {
	if l.shares, err = virtiofsd.Start(ctx, d.shareOptions(def), def.Shares); err != nil {
		return err
	}
	for i, s := range def.Shares {
		if s.Driver != machine.ShareVirtiofs {
			continue
		}
		conn, err := l.shares.Conn(s.Tag)
		if err != nil {
			return err
		}
		l.grant.Sockets = append(l.grant.Sockets, vmwrap.Plain{Path: d.layout.placeholder(def.Name, shareName(i)), FD: l.add(conn)})
	}
	return nil
}

// openConsoles opens the input and output of the serial console and makes the sockets of the channels. libvirt numbers
// the devices' IDs in the order in which domainXML lists the devices.
func (l *launch) openConsoles(_ context.Context, _ *Driver, def machine.Definition) error {
	log, err := qemu.OpenSerialLog(def.SerialLog)
	if err != nil {
		return err
	}
	l.grant.Serial = &vmwrap.Serial{ID: "charserial0", Output: l.add(log)}
	input, err := machine.MakePipe(filepath.Join(def.Dir, machine.SerialInput))
	if err != nil {
		return err
	}
	l.grant.Serial.Input = l.add(input)
	l.grant.Rings = []vmwrap.Ring{{ID: firmwareRing, Size: boot.RingSize}}
	sockets := []string{machine.AgentSocket, machine.QGASocket}
	if def.SessionPorts {
		sockets = append(sockets, machine.SessionSockets[:]...)
	}
	for i, name := range sockets {
		socket, err := unixsocket.Listen(filepath.Join(def.Dir, name))
		if err != nil {
			return err
		}
		l.grant.Chardevs = append(l.grant.Chardevs, vmwrap.Chardev{ID: fmt.Sprintf("charchannel%d", i), Socket: l.add(socket)})
	}
	return nil
}

func (l *launch) openNICs(ctx context.Context, d *Driver, def machine.Definition) error {
	for _, nic := range def.NICs {
		if d.cfg.Opener == nil {
			return fmt.Errorf("the driver has no opener for taps: %w", errdefs.ErrFailedPrecondition)
		}
		tap, err := d.cfg.Opener.Tap(ctx, nic)
		if err != nil {
			return fmt.Errorf("tap %s: %w", nic.Tap, err)
		}
		granted := vmwrap.NIC{MAC: nic.MAC, MTU: nic.MTU, Tap: l.add(tap)}
		if vhost, err := os.OpenFile("/dev/vhost-net", os.O_RDWR, 0); err == nil {
			index := l.add(vhost)
			granted.VHost = &index
		}
		l.grant.NICs = append(l.grant.NICs, granted)
	}
	return nil
}

// grant is the handler of the tap service. It answers the wrapper of a starting machine once, and only if the wrapper's
// user and secret are right. Before it answers, it moves the wrapper, which becomes QEMU, into the machine's cgroup and
// records the run.
func (d *Driver) grant(ctx context.Context, peer fdpass.Peer, request []byte) (fdpass.Reply, error) {
	var r vmwrap.Request
	if err := json.Unmarshal(request, &r); err != nil {
		return fdpass.Reply{}, fmt.Errorf("decode the wrapper's request: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	refused := fmt.Errorf("user %d is starting no machine with this name and secret: %w", peer.UID, errdefs.ErrPermissionDenied)
	in, err := d.find(r.Machine)
	if err != nil {
		return fdpass.Reply{}, refused
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	l := in.launch
	if l == nil || l.granted || peer.UID != in.def.UID || subtle.ConstantTimeCompare([]byte(r.Secret), []byte(l.secret)) != 1 {
		return fdpass.Reply{}, refused
	}
	l.granted = true
	proc, err := process.Open(peer.PID)
	if err != nil {
		return fdpass.Reply{}, err
	}
	in.proc = proc
	in.shares, l.shares = l.shares, nil
	in.run = run{Process: proc.ID, Shares: in.shares.IDs(), Boot: machine.BootID(), StartedAt: time.Now()}
	if in.def.Cgroup != "" {
		if err := d.joinCgroup(in.def.Cgroup, peer.PID); err != nil {
			return fdpass.Reply{}, err
		}
		in.run.OOMKills, _ = stats.OOMKills(in.def.Cgroup) // ignore an error: the same check at the run's end will fail too
	}
	if err := errors.Join(in.run.save(in.def.StateDir), fpGranted.Hit(ctx)); err != nil {
		return fdpass.Reply{}, err
	}
	files := l.files
	l.files = nil
	return fdpass.Reply{Body: l.grant, Files: files}, nil
}

// joinCgroup moves a process into a cgroup.
func (d *Driver) joinCgroup(cgroup string, pid int) error {
	if err := d.cfg.Cgroup.Join(cgroup, pid); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// inCgroup reports whether all threads of a process are in the cgroup, in all hierarchies of the cgroup version that
// Tripod uses.
func (d *Driver) inCgroup(pid int, cgroup string) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/cgroup", pid))
	for _, task := range tasks {
		raw, _ := os.ReadFile(task) // empty for a thread that has ended
		for line := range strings.Lines(string(raw)) {
			parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
			if len(parts) == 3 && (parts[1] == "") == d.cfg.Cgroup.V2 && !strings.HasSuffix(parts[2], cgroup) {
				return false
			}
		}
	}
	return true
}
