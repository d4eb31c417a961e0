package rootdisk

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/loopdev"
	"github.com/tripod-run/tripod/test/races"
)

// loop makes a loop device of size bytes, backed by file.
func loop(t *testing.T, size int64) (device, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "device")
	check(t, os.WriteFile(file, nil, 0o600))
	check(t, os.Truncate(file, size))
	return loopdev.Attach(t, file), file
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// checkDisk checks the guest's disk on a device.
func checkDisk(t *testing.T, device string, s Source) {
	t.Helper()
	all, err := os.ReadFile(device)
	check(t, err)
	if !bytes.Equal(all[Offset:Offset+s.Size], s.bytes(t)) {
		t.Errorf("%s does not hold the disk of %q", device, s.Image)
	}
}

// TestPrepare: Prepare copies an image to an empty device once. The guest's writes stay, even for another image, unless
// overwriting is allowed.
func TestPrepare(t *testing.T) {
	device, _ := loop(t, 8*chunk+4096)
	one, two := image(1, 3*chunk+512), image(2, 4*chunk)
	first, err := Prepare(t.Context(), device, one, OverwriteNever)
	if err != nil || !first.Copied || first.Offset != Offset || first.Size != 7*chunk+4096 || first.Image != one.Image {
		t.Fatalf("Prepare of an empty device = %+v, %v; want a new copy", first, err)
	}
	checkDisk(t, device, one)
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt([]byte("the guest's"), Offset+5)
	check(t, err)
	check(t, f.Close())
	for _, c := range []struct {
		src  Source
		over Overwrite
	}{{one, OverwriteNever}, {one, OverwriteForeign}, {one, OverwriteImage}, {two, OverwriteNever}, {two, OverwriteForeign}} {
		disk, err := Prepare(t.Context(), device, c.src, c.over)
		if err != nil || disk.Copied || disk.ID != first.ID || disk.Image != one.Image {
			t.Errorf("Prepare with %q, overwrite %s = %+v, %v; want the first disk", c.src.Image, c.over, disk, err)
		}
	}
	check(t, Check(device, first.ID, 0))
	again, err := Prepare(t.Context(), device, two, OverwriteImage)
	if err != nil || !again.Copied || again.ID == first.ID {
		t.Errorf("Prepare over another image = %+v, %v; want a new copy", again, err)
	}
	checkDisk(t, device, two)
	if err := Check(device, first.ID, 0); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check of the overwritten disk: got error %v, want ErrFailedPrecondition", err)
	}
}

// TestPrepareQCOW2: Prepare decompresses a qcow2 image.
func TestPrepareQCOW2(t *testing.T) {
	device, _ := loop(t, 8*chunk)
	want := image(3, 4*chunk)
	raw, path := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "qcow2")
	check(t, os.WriteFile(raw, want.bytes(t), 0o600))
	if out, err := exec.Command("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, path).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img convert: %v: %s", err, out)
	}
	packed, err := os.ReadFile(path)
	check(t, err)
	src := Source{Image: want.Image, File: bytes.NewReader(packed), FileSize: int64(len(packed)), Format: "qcow2", Size: want.Size}
	_, err = Prepare(t.Context(), device, src, OverwriteNever)
	check(t, err)
	checkDisk(t, device, want)
	src.File = bytes.NewReader(packed[:len(packed)/2])
	src.FileSize, src.Image = int64(len(packed)/2), "broken"
	if _, err := Prepare(t.Context(), device, src, OverwriteImage); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Prepare with a truncated image: got error %v, want ErrInvalidArgument", err)
	}
	if d, err := Prepare(t.Context(), device, want, OverwriteNever); err != nil || !d.Copied {
		t.Errorf("Prepare after a failed copy = %+v, %v; want a new copy", d, err)
	}
}

// TestPrepareRefused: Prepare does not touch a device that has content, is too small, or is no block device.
func TestPrepareRefused(t *testing.T) {
	src := image(1, 3*chunk)
	dirt := map[string]int64{"a partition table": 512, "a file system": 0x10040, "data where the disk would begin": Offset + 7,
		"a backup at the end": 8*chunk - 512}
	for name, at := range dirt {
		device, file := loop(t, 8*chunk)
		f, err := os.OpenFile(device, os.O_WRONLY, 0)
		check(t, err)
		_, err = f.WriteAt([]byte("something"), at)
		check(t, err)
		check(t, f.Sync())
		check(t, f.Close())
		before, err := os.ReadFile(file)
		check(t, err)
		for _, over := range []Overwrite{OverwriteNever, ""} {
			if _, err := Prepare(t.Context(), device, src, over); !errdefs.IsFailedPrecondition(err) ||
				!strings.Contains(err.Error(), "root-device-overwrite") {
				t.Errorf("Prepare over %s: got error %v, want ErrFailedPrecondition that names the annotation", name, err)
			}
		}
		if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
			t.Errorf("Prepare over %s changed the device (error %v)", name, err)
		}
		if d, err := Prepare(t.Context(), device, src, OverwriteForeign); err != nil || !d.Copied {
			t.Errorf("Prepare over %s with overwrite = %+v, %v; want a copy", name, d, err)
		}
	}
	small, _ := loop(t, 4*chunk-512)
	if _, err := Prepare(t.Context(), small, src, OverwriteNever); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Prepare of a device that is too small: got error %v, want ErrInvalidArgument", err)
	}
	tiny, _ := loop(t, 512)
	if _, err := Prepare(t.Context(), tiny, src, OverwriteNever); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Prepare of a device smaller than the mark's area: got error %v, want ErrInvalidArgument", err)
	}
	for _, path := range []string{"/dev/null", "/etc/passwd", "/nowhere"} {
		if _, err := Prepare(t.Context(), path, src, OverwriteForeign); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Prepare(%s): got error %v, want ErrInvalidArgument", path, err)
		}
	}
}

// TestPrepareInUse: Prepare does not write to a device that is open exclusively or locked by QEMU.
func TestPrepareInUse(t *testing.T) {
	src := image(1, 3*chunk)
	device, _ := loop(t, 8*chunk)
	mounted, err := os.OpenFile(device, os.O_RDWR|unix.O_EXCL, 0)
	check(t, err)
	if _, err := Prepare(t.Context(), device, src, OverwriteNever); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "mounted") {
		t.Errorf("Prepare of a device that is open exclusively: got error %v, want ErrFailedPrecondition", err)
	}
	check(t, mounted.Close())
	used, err := os.OpenFile(device, os.O_RDWR, 0)
	check(t, err)
	defer used.Close()
	check(t, unix.FcntlFlock(used.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 201, Len: 1}))
	if _, err := Prepare(t.Context(), device, src, OverwriteNever); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "in use by a machine") {
		t.Errorf("Prepare of a device that QEMU has locked: got error %v, want ErrFailedPrecondition", err)
	}
}

// TestDamagedMark: Prepare neither trusts nor overwrites a damaged mark.
func TestDamagedMark(t *testing.T) {
	device, _ := loop(t, 8*chunk)
	src := image(1, 3*chunk)
	if _, err := Prepare(t.Context(), device, src, OverwriteNever); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	check(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte{9}, 60)
	check(t, err)
	if _, err := Prepare(t.Context(), device, src, OverwriteNever); !errdefs.IsDataLoss(err) {
		t.Errorf("Prepare with a damaged mark: got error %v, want ErrDataLoss", err)
	}
	if d, err := Prepare(t.Context(), device, src, OverwriteForeign); err != nil || !d.Copied {
		t.Errorf("Prepare over a damaged mark with overwrite = %+v, %v; want a copy", d, err)
	}
	newer := mark{Magic: magic, Version: 2, Stage: stageComplete}
	_, err = f.WriteAt(newer.encode(), 0)
	check(t, err)
	if _, err := Prepare(t.Context(), device, src, OverwriteNever); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Prepare with a mark of a newer version: got error %v, want ErrFailedPrecondition", err)
	}
}

// victimEnv is the environment variable with the orders, as JSON, for a process that dies at a fail point.
const victimEnv = "TRIPOD_ROOTDISK_VICTIM"

type victim struct{ Device, Raw string }

func (v victim) live() error {
	src, err := v.source()
	if err != nil {
		return err
	}
	d, err := Prepare(context.Background(), v.Device, src, OverwriteNever)
	if err != nil {
		return err
	}
	_, err = KeepVars(context.Background(), v.Device, d.ID, template(1, maxVars))
	return err
}

func (v victim) source() (Source, error) {
	f, err := os.Open(v.Raw)
	if err != nil {
		return Source{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return Source{}, err
	}
	return Source{Image: "the image", File: f, FileSize: info.Size(), Format: "raw", Size: uint64(info.Size())}, nil
}

func TestMain(m *testing.M) {
	if orders := os.Getenv(victimEnv); orders != "" {
		var v victim
		err := json.Unmarshal([]byte(orders), &v)
		if err == nil {
			err = v.live()
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(races.Run(m.Run))
}

// TestV4Killed: the copying process is killed at each fail point. The device is complete only if the whole disk is on
// it, and the next process completes it, unhindered by locks. So it is with the UEFI variables.
func TestV4Killed(t *testing.T) {
	failpoint.Needed(t)
	want := image(1, 5*chunk)
	raw := filepath.Join(t.TempDir(), "raw")
	check(t, os.WriteFile(raw, want.bytes(t), 0o600))
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "rootdisk.") {
			continue
		}
		device, _ := loop(t, 8*chunk)
		v := victim{Device: device, Raw: raw}
		orders, err := json.Marshal(v)
		check(t, err)
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), victimEnv+"="+string(orders), failpoint.Variable+"="+point+"=kill")
		out, err := cmd.CombinedOutput()
		if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !s.Signaled() || s.Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the process was not killed: %v %s", point, err, out)
		}
		src, err := v.source()
		check(t, err)
		d, err := Prepare(t.Context(), device, src, OverwriteNever)
		complete := point == "rootdisk.complete" || strings.HasPrefix(point, "rootdisk.vars-")
		if err != nil || d.Copied == complete {
			t.Errorf("Prepare after a kill at %s = %+v, %v; want a new copy unless it was complete", point, d, err)
		}
		if kept := Check(device, d.ID, maxVars) == nil; kept != (point == "rootdisk.vars-marked") {
			t.Errorf("after a kill at %s, the device has UEFI variables: %t", point, kept)
		}
		if replaced, err := KeepVars(t.Context(), device, d.ID, template(1, maxVars)); err != nil || replaced != 0 {
			t.Errorf("KeepVars after a kill at %s = %d, %v; want none replaced", point, replaced, err)
		}
		checkVars(t, device, template(1, maxVars))
		checkDisk(t, device, want)
	}
}

// TestCancelled: a canceled copy ends and is not complete.
func TestCancelled(t *testing.T) {
	failpoint.Needed(t)
	device, _ := loop(t, 8*chunk)
	check(t, failpoint.Arm("rootdisk.copying", "hang"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Prepare(ctx, device, image(1, 3*chunk), OverwriteNever)
	check(t, failpoint.Arm("rootdisk.copying", ""))
	if err == nil {
		t.Error("Prepare with a canceled context succeeded")
	}
	if d, err := Prepare(t.Context(), device, image(1, 3*chunk), OverwriteNever); err != nil || !d.Copied {
		t.Errorf("Prepare after a canceled copy = %+v, %v; want a new copy", d, err)
	}
}
