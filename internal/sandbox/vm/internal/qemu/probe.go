package qemu

import (
	"context"
	_ "embed" // the boot sector
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// bootSector is firmware/probe.S.
//
//go:embed firmware/probe.bin
var bootSector []byte

const (
	// probeExit is QEMU's exit code when the boot sector has run to its end.
	probeExit = 2*0x2a + 1
	// probeTime is how long it may take: 130 ms under TCG and less under KVM, when the machine has nothing else to do.
	probeTime = 20 * time.Second
	// probeDisk is the size of the disk with the boot sector; the firmware boots from none of one sector.
	probeDisk = 1 << 20
	// verdictFile keeps the verdict, in Root.
	verdictFile = "accel.json"
)

// Verdict is what accelerates machines on this node.
type Verdict struct {
	// Accel is AccelKVM or AccelTCG, Why the reason, for a person.
	Accel string `json:"accel"`
	Why   string `json:"why"`
}

// kept is the file of the verdict. It holds as long as nothing of Key changes.
type kept struct {
	Version int    `json:"version"`
	Key     string `json:"key"`
	Verdict
}

// Probe tells what accelerates machines. With AccelAuto it finds out by doing: a guest of one sector is started under KVM
// as every machine is, and must boot, reach 64-bit mode with paging, and get interrupts. That /dev/kvm can be opened
// proves nothing: there are hosts where it can and no guest boots. The verdict is kept on disk for this kernel, QEMU and
// processor.
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
	var k kept
	if err := readJSON(path, &k); err != nil || k.Key != key {
		err := d.cfg.tryKVM(ctx)
		if err != nil && ctx.Err() != nil {
			return Verdict{}, fmt.Errorf("try KVM: %w", context.Cause(ctx))
		}
		k = kept{recordVersion, key, Verdict{AccelKVM, "a guest boots under KVM"}}
		if err != nil {
			k.Verdict = Verdict{AccelTCG, "KVM: " + err.Error()}
		}
		// What failed for want of time may do so once only: it is asked again by the next daemon.
		if !errors.Is(err, context.DeadlineExceeded) {
			if err := writeJSON(path, k, false); err != nil {
				d.log.Warn("the verdict on KVM is not kept", "err", err)
			}
		}
		d.log.Info("what accelerates machines", "accel", k.Accel, "why", k.Why)
	}
	d.mu.Lock()
	d.verdict = &k.Verdict
	d.mu.Unlock()
	return k.Verdict, nil
}

// verdictKey is all that the verdict depends on.
func (c Config) verdictKey() string {
	var uts unix.Utsname
	_ = unix.Uname(&uts)
	parts := []string{unix.ByteSliceToString(uts.Release[:]), unix.ByteSliceToString(uts.Version[:]), processor(), fmt.Sprint(c.UID, c.GID)}
	for _, file := range []string{c.Emulator, "/dev/kvm"} {
		info, err := os.Stat(file)
		if err != nil {
			parts = append(parts, file+" none")
			continue
		}
		part := fmt.Sprint(file, info.Mode(), info.Size())
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			part += fmt.Sprint(" ", st.Uid, st.Gid)
		}
		if info.Mode().IsRegular() {
			part += info.ModTime().UTC().Format(time.RFC3339Nano)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

// processor is the first processor's name and features' count, which microcode and live migration change.
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

// tryKVM boots the probe under KVM.
func (c Config) tryKVM(ctx context.Context) error {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrNotFound)
	}
	return c.try(ctx, AccelKVM)
}

// try boots the boot sector under an accelerator, by a QEMU that is as confined as any.
func (c Config) try(ctx context.Context, accel string) error {
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
	cmd.add("-name", "guest="+mark+"probe", "-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,usb=off,vmport=off", "-accel", acceleration(accel), "-cpu", cpuModel("", accel), "-m", "32M",
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
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = qemu.Process.Kill() })
	err = qemu.Wait()
	words := lastWords(fmt.Sprintf("/proc/self/fd/%d", log.Fd()))
	switch {
	case !stop():
		return fmt.Errorf("no guest boots within %s: %w", probeTime, ctx.Err())
	case qemu.ProcessState.ExitCode() == probeExit:
		return nil
	case words != "":
		return fmt.Errorf("no guest boots: %s (%w)", words, errdefs.ErrFailedPrecondition)
	default:
		return fmt.Errorf("no guest boots: %w (%w)", err, errdefs.ErrFailedPrecondition)
	}
}

// memoryFile makes a file in memory that vanishes with its descriptors.
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
