package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpSaved     = failpoint.New("qemu.save.saved")
	fpFilled    = failpoint.New("qemu.start.filled")
	fpContinued = failpoint.New("qemu.start.continued")
)

// The files of a saved machine. savedKey is written last.
const (
	savedMemory = "memory"
	savedState  = "state"
	savedKey    = "key"
)

const (
	// migrationPoll is the interval at which QEMU is asked whether it has written or read a state. That takes 20 ms.
	migrationPoll = time.Millisecond
	// memoryPage is the unit in bytes in which zeros are left out of a saved memory.
	memoryPage = 4 << 10
)

// ignoreShared makes QEMU leave the guest's memory, which is in a file, out of the state.
var ignoreShared = map[string]any{"capabilities": []any{map[string]any{"capability": "x-ignore-shared", "state": true}}}

// SaveKey implements machine.Driver.
func (d *Driver) SaveKey(ctx context.Context, def machine.Definition) (string, error) {
	verdict, err := d.Probe(ctx)
	if err != nil {
		return "", err
	}
	shape := machine.Definition{
		CPUs: def.CPUs, CPUModel: def.CPUModel, Memory: def.BootMemory(), Growth: def.Growth, Cmdline: def.Cmdline,
		SessionPorts: def.SessionPorts, Plug: def.Plug, VNC: def.VNC,
	}
	parts := []string{fmt.Sprint(recordVersion), d.cfg.verdictKey(), verdict.Accel}
	files := []string{d.cfg.Emulator}
	for _, f := range []*machine.File{def.Kernel, def.Initrd} {
		if f != nil {
			files = append(files, f.Path)
		}
	}
	for _, disk := range def.Disks {
		if disk.ReadOnly && disk.Like == "" {
			files = append(files, disk.Path)
		}
		if disk.Base != nil {
			parts = append(parts, identity(disk.Base.Path))
			disk.Base = &machine.Base{Format: disk.Base.Format}
		}
		disk.Path = ""
		shape.Disks = append(shape.Disks, disk)
	}
	for _, file := range files {
		content, err := d.contents.digest(file)
		if err != nil {
			return "", err
		}
		parts = append(parts, content)
	}
	raw, err := json.Marshal(struct {
		Parts []string
		Shape machine.Definition
	}{parts, shape})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// Save implements machine.Driver.
func (d *Driver) Save(ctx context.Context, name, dir string) error {
	r, def, err := d.running(name)
	if err = errors.Join(err, CheckCopy(ctx)); err != nil {
		return err
	}
	if !def.Plug || len(def.NICs) > 0 || len(def.Shares) > 0 || def.Memory > def.BootMemory() {
		return fmt.Errorf("machine %.64s cannot be saved: it has a NIC or a share, or has grown: %w", name, errdefs.ErrFailedPrecondition)
	}
	key, err := d.SaveKey(ctx, def)
	if err != nil {
		return err
	}
	ctx, cancel := r.whileAlive(ctx)
	defer cancel()
	if err := r.saveState(ctx, filepath.Join(dir, savedState)); err != nil {
		return fmt.Errorf("save the devices of machine %.64s: %w", name, err)
	}
	if err := r.saveMemory(ctx, def, filepath.Join(dir, savedMemory)); err != nil {
		return fmt.Errorf("save the memory of machine %.64s: %w", name, err)
	}
	if err := fpSaved.Hit(ctx); err != nil {
		return err
	}
	return writeSynced(filepath.Join(dir, savedKey), func(f *os.File) error {
		_, err := f.WriteString(key)
		return err
	})
}

// saveState pauses the guest and writes the state of its devices.
func (r *run) saveState(ctx context.Context, path string) error {
	m, err := r.monitor()
	if err != nil {
		return err
	}
	return writeSynced(path, func(f *os.File) error {
		if err := m.Execute(ctx, "stop", nil, nil); err != nil {
			return err
		}
		if err := m.Execute(ctx, "migrate-set-capabilities", ignoreShared, nil); err != nil {
			return err
		}
		if err := m.Execute(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": int64(1) << 40}, nil); err != nil {
			return err
		}
		if err := m.ExecuteFile(ctx, "getfd", map[string]any{"fdname": savedState}, f, nil); err != nil {
			return err
		}
		if err := m.Execute(ctx, "migrate", map[string]any{"uri": "fd:" + savedState}, nil); err != nil {
			return err
		}
		return r.awaitMigration(ctx)
	})
}

// awaitMigration waits until QEMU has written or read a state.
func (r *run) awaitMigration(ctx context.Context) error {
	tick := time.NewTicker(migrationPoll)
	defer tick.Stop()
	for {
		var answer struct {
			Status string `json:"status"`
			Why    string `json:"error-desc"`
		}
		m, err := r.monitor()
		if err != nil {
			return err
		}
		if err := m.Execute(ctx, "query-migrate", nil, &answer); err != nil {
			return err
		}
		switch answer.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU's migration %s: %s: %w", answer.Status, answer.Why, errdefs.ErrFailedPrecondition)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("QEMU's migration is %s: %w (%w)", answer.Status, context.Cause(ctx), errdefs.ErrUnavailable)
		}
	}
}

// saveMemory copies the memory of a paused guest, which is the file that QEMU has inherited for it. Pages of zeros become
// holes.
func (r *run) saveMemory(ctx context.Context, def machine.Definition, path string) error {
	fd := build(def, hostSetup{Block: blockDevice}).memoryFD()
	from, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", r.proc.Pid, fd))
	if err != nil {
		return err
	}
	defer from.Close()
	return writeSynced(path, func(f *os.File) error {
		if err := f.Truncate(int64(mebibytes(def.BootMemory()) << 20)); err != nil {
			return err
		}
		return copyMemory(ctx, f, from)
	})
}

// memoryFD returns the number of the descriptor of the guest's memory in QEMU.
func (c command) memoryFD() int {
	for i, f := range c.Files {
		if f.Kind == kindMemory {
			return firstFD + i
		}
	}
	return -1
}

// copyMemory copies what is neither a hole nor a page of zeros.
func copyMemory(ctx context.Context, to, from *os.File) error {
	zeros := make([]byte, memoryPage)
	buffer := make([]byte, 1<<20)
	for at := int64(0); ; {
		start, err := from.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no more data
		}
		if err != nil {
			return err
		}
		if at, err = from.Seek(start, unix.SEEK_HOLE); err != nil {
			return err
		}
		for start < at {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			n, err := from.ReadAt(buffer[:min(int64(len(buffer)), at-start)], start)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			for page := 0; page < n; page += memoryPage {
				data := buffer[page:min(page+memoryPage, n)]
				if bytes.Equal(data, zeros[:len(data)]) {
					continue
				}
				if _, err := to.WriteAt(data, start+int64(page)); err != nil {
					return err
				}
			}
			start += int64(n)
		}
	}
}

// writeSynced makes a file, which only root can read, and returns once its content is on disk.
func writeSynced(path string, write func(*os.File) error) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Sync(), f.Close())
}

// openMemory returns a file for the memory of a guest. That of a machine that continues has the saved content.
func (h *handle) openMemory(ctx context.Context, def machine.Definition) (*os.File, error) {
	if !def.Plug {
		return nil, nil
	}
	size := int64(mebibytes(def.BootMemory()) << 20)
	memory, err := memoryFile("tripod-memory", nil, size)
	if err != nil {
		return nil, err
	}
	if def.Saved != "" {
		if err := errors.Join(h.fillMemory(ctx, def, memory), memory.Truncate(size), fpFilled.Hit(ctx)); err != nil {
			memory.Close()
			return nil, fmt.Errorf("%w: %w", machine.ErrSaved, err)
		}
	}
	return memory, nil
}

// copySparse is the program that fills a machine's memory, with its option.
var copySparse = []string{"cp", "--sparse=auto"}

// CheckCopy returns errdefs.ErrNotFound if the program that copies the memory of saved machines is missing, or is not GNU's.
func CheckCopy(ctx context.Context) error {
	if out, err := exec.CommandContext(ctx, copySparse[0], copySparse[1], "--version").CombinedOutput(); err != nil {
		return fmt.Errorf("cp of GNU coreutils, which copies the memory of machines: %w: %s (%w)", err, bytes.TrimSpace(out), errdefs.ErrNotFound)
	}
	return nil
}

// fillMemory copies a saved memory. A process in the machine's cgroup does it, because the kernel charges memory to the
// cgroup of the process that first writes to it.
func (h *handle) fillMemory(ctx context.Context, def machine.Definition, memory *os.File) error {
	key, err := h.d.SaveKey(ctx, def)
	if err != nil {
		return err
	}
	saved, err := os.ReadFile(filepath.Join(def.Saved, savedKey))
	if err != nil {
		return refusedIfMissing(err)
	}
	if string(saved) != key {
		return fmt.Errorf("%w: the machine in %s was saved by another QEMU, on another processor or with other devices: %w", machine.ErrRefused,
			def.Saved, errdefs.ErrFailedPrecondition)
	}
	from, err := os.Open(filepath.Join(def.Saved, savedMemory))
	if err != nil {
		return refusedIfMissing(err)
	}
	defer from.Close()
	if info, err := from.Stat(); err != nil {
		return err
	} else if want := int64(mebibytes(def.BootMemory()) << 20); info.Size() != want {
		return fmt.Errorf("%w: the memory in %s has %d bytes, not %d: %w", machine.ErrRefused, def.Saved, info.Size(), want,
			errdefs.ErrFailedPrecondition)
	}
	var words bytes.Buffer
	cmd := exec.Command(copySparse[0], copySparse[1], "/proc/self/fd/3", "/proc/self/fd/4")
	cmd.ExtraFiles, cmd.Stderr = []*os.File{from, memory}, &words
	cmd.Env, cmd.Dir, cmd.SysProcAttr = confine.Environment(), "/", &syscall.SysProcAttr{}
	if err := confine.Start(cmd, confine.Place{Tree: h.d.cfg.Cgroup, Cgroup: def.Cgroup}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("copy the saved memory: %w: %s", errors.Join(err, context.Cause(ctx)), bytes.TrimSpace(words.Bytes()))
	}
	return nil
}

// refusedIfMissing adds machine.ErrRefused to the error of opening a file of a saved machine, if the file is missing.
func refusedIfMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w (%w)", machine.ErrRefused, err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// errLoad is in the errors of resume if QEMU has not loaded the state. It ends if it cannot.
var errLoad = errors.New("load the saved devices")

// resume loads the saved state, plugs in the machine's other devices, and lets the guest continue.
func (r *run) resume(ctx context.Context, def machine.Definition, late []map[string]any) error {
	m, err := r.monitor()
	if err != nil {
		return err
	}
	state, err := os.Open(filepath.Join(def.Saved, savedState))
	if err != nil {
		return refusedIfMissing(err)
	}
	defer state.Close()
	if err := m.Execute(ctx, "migrate-set-capabilities", ignoreShared, nil); err != nil {
		return err
	}
	if err := m.ExecuteFile(ctx, "getfd", map[string]any{"fdname": savedState}, state, nil); err != nil {
		return err
	}
	if err := m.Execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:" + savedState}, nil); err != nil {
		return err
	}
	if err := r.awaitMigration(ctx); err != nil {
		return fmt.Errorf("%w: %w", errLoad, err)
	}
	for _, device := range late {
		if err := m.Execute(ctx, "device_add", device, nil); err != nil {
			return fmt.Errorf("plug in %s: %w", device["driver"], err)
		}
	}
	if _, growth := grown(def, def.Memory); growth > 0 {
		if err := m.Execute(ctx, "qom-set", requestGrowth(growth), nil); err != nil {
			return err
		}
	}
	if err := m.Execute(ctx, "cont", nil, nil); err != nil {
		return err
	}
	return fpContinued.Hit(ctx)
}
