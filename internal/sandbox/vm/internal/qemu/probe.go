package qemu

import (
	"context"
	"crypto/sha256"
	_ "embed" // the boot sector
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// bootSector is the assembled firmware/probe.S.
//
//go:embed firmware/probe.bin
var bootSector []byte

const (
	// probeExit is QEMU's exit code after a complete run of the boot sector.
	probeExit = 2*0x2a + 1
	// probeTimeout bounds the boot of the probe. On an idle host, the boot takes 130 ms under TCG, and less under KVM.
	probeTimeout = 20 * time.Second
	// probeDisk is the size of the disk with the boot sector. It is more than a sector, because the firmware does not
	// boot from a disk of one sector.
	probeDisk = 1 << 20
	// verdictFile is the name of the stored verdict, in Root.
	verdictFile = "accel.json"
)

// Verdict is the accelerator for machines on this node.
type Verdict struct {
	// Accel is AccelKVM or AccelTCG. The text in Why tells people the reason.
	Accel string `json:"accel"`
	Why   string `json:"why"`
}

// probeRecord is the content of verdictFile. It is valid as long as Key equals the result of verdictKey.
type probeRecord struct {
	Version int    `json:"version"`
	Key     string `json:"key"`
	Verdict
}

// Probe returns the accelerator for machines. With AccelAuto, Probe boots a guest of one sector under KVM, in a QEMU
// that is started like a machine's. The guest must boot, reach 64-bit mode with paging, and receive interrupts. It is
// not enough that /dev/kvm can be opened: on some hosts it can, but no guest boots. Probe stores the verdict, which
// holds only for this kernel, QEMU and processor.
func (d *Driver) Probe(ctx context.Context) (Verdict, error) {
	if d.cfg.Accel != AccelAuto {
		return Verdict{d.cfg.Accel, "configured by vm.accel"}, nil
	}
	d.probing.Lock()
	defer d.probing.Unlock()
	d.mu.Lock()
	have := d.verdict
	d.mu.Unlock()
	if have != nil {
		return *have, nil
	}
	key, path := d.cfg.verdictKey(), filepath.Join(d.cfg.Root, verdictFile)
	var k probeRecord
	if err := readJSON(path, &k); err != nil || k.Key != key {
		err := d.cfg.tryKVM(ctx)
		if err != nil && ctx.Err() != nil {
			return Verdict{}, fmt.Errorf("try KVM: %w", context.Cause(ctx))
		}
		k = probeRecord{recordVersion, key, Verdict{AccelKVM, "a guest boots under KVM"}}
		if err != nil {
			k.Verdict = Verdict{AccelTCG, "KVM: " + err.Error()}
		}
		// The verdict of a probe that timed out is not stored, so that the next daemon repeats the probe.
		if !errors.Is(err, context.DeadlineExceeded) {
			if err := writeJSON(path, k, false); err != nil {
				d.log.Warn("storing the verdict on KVM failed", "err", err)
			}
		}
		d.log.Info("accelerator chosen", "accel", k.Accel, "why", k.Why)
	}
	d.mu.Lock()
	d.verdict = &k.Verdict
	d.mu.Unlock()
	return k.Verdict, nil
}

// verdictKey returns everything that the verdict depends on.
func (c Config) verdictKey() string {
	var uts unix.Utsname
	_ = unix.Uname(&uts)
	parts := []string{unix.ByteSliceToString(uts.Release[:]), unix.ByteSliceToString(uts.Version[:]), processor(), fmt.Sprint(c.UID, c.GID)}
	for _, file := range []string{c.Emulator, "/dev/kvm"} {
		parts = append(parts, identity(file))
	}
	return strings.Join(parts, "; ")
}

// identity returns what tells a file from another one that may later have its path. Distributions can give all files the same
// time of change; see contents.
func identity(file string) string {
	info, err := os.Stat(file)
	if err != nil {
		return file + " none"
	}
	id := fmt.Sprint(file, info.Mode(), info.Size())
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		id += fmt.Sprint(" ", st.Uid, st.Gid)
		if info.Mode().IsRegular() {
			id += fmt.Sprint(" ", st.Ino, st.Mtim, st.Ctim)
		}
	}
	return id
}

// contents has the digests of files. A file is read again only if it has changed.
type contents struct {
	mu    sync.Mutex
	known map[string]content // by path
}

type content struct{ stat, digest string }

func (c *contents) digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	stat := fmt.Sprint(st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.known[path]; have.stat == stat {
		return have.digest, nil
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	if c.known == nil {
		c.known = map[string]content{}
	}
	c.known[path] = content{stat, hex.EncodeToString(sum.Sum(nil))}
	return c.known[path].digest, nil
}

// processor returns the name of the first processor and the number of its features. A microcode update or a live
// migration of the host can change both.
func processor() string {
	raw, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	name, flags := "", 0
	for line := range strings.Lines(string(raw)) {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "model name":
			name = strings.TrimSpace(value)
		case "flags":
			flags = len(strings.Fields(value))
		case "":
			return fmt.Sprint(name, " ", flags)
		}
	}
	return fmt.Sprint(name, " ", flags)
}

// tryKVM boots the probe under KVM. It returns errdefs.ErrNotFound if /dev/kvm is missing.
func (c Config) tryKVM(ctx context.Context) error {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrNotFound)
	}
	return c.bootProbe(ctx, AccelKVM)
}

// bootProbe boots the boot sector under an accelerator, in a QEMU that is confined like a machine's.
func (c Config) bootProbe(ctx context.Context, accel string) error {
	disk, err := memoryFile("tripod-probe", bootSector, probeDisk)
	if err != nil {
		return err
	}
	defer disk.Close()
	log, err := memoryFile("tripod-probe-log", nil, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	var cmd command
	file := cmd.fdset(inherited{Kind: kindWrite})
	cmd.add("-name", "guest="+namePrefix+"probe", "-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,usb=off,vmport=off", "-accel", acceleration(accel, machine.Definition{}), "-cpu", cpuModel("", accel), "-m", "32M",
		"-device", "isa-debug-exit,iobase=0x501,iosize=1")
	cmd.blockdev(map[string]any{"driver": "file", "node-name": "probe-file", "filename": file})
	cmd.blockdev(map[string]any{"driver": "raw", "node-name": "probe", "file": "probe-file"})
	cmd.add("-device", "virtio-blk-pci,drive=probe,bootindex=1")
	qemu, err := spawn{
		Program: c.Emulator, Args: cmd.Args, Files: []*os.File{disk}, Log: log, UID: c.UID, GID: c.GID, KVM: accel == AccelKVM,
	}.start()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = qemu.Process.Kill() })
	err = qemu.Wait()
	words := lastWords(fmt.Sprintf("/proc/self/fd/%d", log.Fd()))
	switch {
	case !stop():
		return fmt.Errorf("no guest boots within %s: %w", probeTimeout, ctx.Err())
	case qemu.ProcessState.ExitCode() == probeExit:
		return nil
	case words != "":
		return fmt.Errorf("no guest boots: %s (%w)", words, errdefs.ErrFailedPrecondition)
	default:
		return fmt.Errorf("no guest boots: %w (%w)", err, errdefs.ErrFailedPrecondition)
	}
}

// memoryFile returns an anonymous file in memory, padded with zeros to size bytes.
func memoryFile(name string, content []byte, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	if size > 0 {
		err = errors.Join(err, f.Truncate(size))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
