package libvirt

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/vmwrap"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// layout is the content of Config.Dir. Root owns it, and every user can enter its directories:
//
//	tap.sock                     the socket of the tap service
//	emulator-HASH/               links: tripod-vmwrap (a domain's <emulator>) and qemu
//	machines/NAME/root, kernel…  placeholders in a domain: empty files, whose existence libvirt checks
type layout struct {
	dir      string
	emulator string // the <emulator> of every domain
}

// publicDir lets other users enter a directory, but not list it.
const publicDir = 0o711

func newLayout(dir, wrapper, emulator string) (layout, error) {
	l := layout{dir: dir}
	if err := makePublic(dir); err != nil {
		return l, err
	}
	// libvirt caches an emulator's capabilities until its file changes. For libvirt, the emulator is the wrapper. So
	// the wrapper's path must change whenever QEMU's file changes.
	info, err := os.Stat(emulator)
	if err != nil {
		return l, err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %d %d", wrapper, emulator, info.Size(), info.ModTime().UnixNano()))
	links := filepath.Join(dir, fmt.Sprintf("emulator-%x", sum[:6]))
	if err := makePublic(links); err != nil {
		return l, err
	}
	for name, target := range map[string]string{vmwrap.ProgramName: wrapper, vmwrap.EmulatorName: emulator} {
		if err := os.Symlink(target, filepath.Join(links, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return l, err
		}
	}
	l.emulator = filepath.Join(links, vmwrap.ProgramName)
	for _, path := range []string{links, wrapper, emulator} {
		if err := checkReachable(path); err != nil {
			return l, err
		}
	}
	return l, makePublic(filepath.Join(dir, "machines"))
}

// makePublic makes a directory with mode publicDir, whatever the umask.
func makePublic(dir string) error {
	if err := os.MkdirAll(dir, publicDir); err != nil {
		return err
	}
	return os.Chmod(dir, publicDir)
}

// checkReachable returns errdefs.ErrFailedPrecondition for a path that other users cannot reach.
func checkReachable(path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	for at := path; ; at = filepath.Dir(at) {
		var st unix.Stat_t
		if err := unix.Stat(at, &st); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		if st.Mode&0o001 == 0 {
			return fmt.Errorf("libvirt executes %s as the machine's user, who cannot enter %s; allow it with chmod o+x: %w",
				path, at, errdefs.ErrFailedPrecondition)
		}
		if at == "/" {
			return nil
		}
	}
}

func (l layout) socket() string { return filepath.Join(l.dir, "tap.sock") }

// listen makes the socket of the tap service. Every user can connect; grant checks each request.
func (l layout) listen() (*net.UnixListener, error) {
	file, err := unixsocket.Listen(l.socket())
	if err != nil {
		return nil, err
	}
	defer file.Close()
	listener, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(l.socket(), 0o666); err != nil {
		listener.Close()
		return nil, err
	}
	return listener.(*net.UnixListener), nil
}

// placeholder returns the path that stands for one of the machine's files in the machine's domain.
func (l layout) placeholder(name, what string) string {
	return filepath.Join(l.dir, "machines", name, what)
}

// prepare makes the placeholders of a machine: files, and directories for its shares.
func (l layout) prepare(d machine.Definition) error {
	if err := makePublic(l.placeholder(d.Name, "")); err != nil {
		return err
	}
	var files []string
	for _, disk := range d.Disks {
		files = append(files, disk.ID)
		if disk.Base != nil {
			files = append(files, disk.ID+baseSuffix)
		}
	}
	if d.UEFI != nil {
		files = append(files, codeName, varsName)
	}
	if d.Kernel != nil {
		files = append(files, kernelName)
	}
	if d.Initrd != nil {
		files = append(files, initrdName)
	}
	for _, name := range files {
		f, err := os.OpenFile(l.placeholder(d.Name, name), os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o444)
		if err != nil {
			return err
		}
		f.Close()
	}
	if d.VNC {
		if err := makePublic(l.placeholder(d.Name, vncName)); err != nil {
			return err
		}
	}
	for i, s := range d.Shares {
		if s.Driver == machine.ShareVirtiofs {
			continue // the placeholder is the path of a socket that never exists
		}
		if err := makePublic(l.placeholder(d.Name, shareName(i))); err != nil {
			return err
		}
	}
	return nil
}

// remove removes the placeholders of a machine.
func (l layout) remove(name string) error { return os.RemoveAll(l.placeholder(name, "")) }

// Names of placeholders. They contain a dot, and so differ from all disk IDs.
const (
	baseSuffix = ".base"
	kernelName = "boot.kernel"
	initrdName = "boot.initrd"
	codeName   = "flash.code"
	varsName   = "flash.vars"
	vncName    = "dir.vnc"
)

func shareName(i int) string { return fmt.Sprintf("dir.share%d", i) }
