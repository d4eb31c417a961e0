package rootdisk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// template returns a template of size bytes for the UEFI variables.
func template(seed byte, size int) []byte {
	all := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(all)
	return all
}

// checkVars checks the UEFI variables on a device.
func checkVars(t *testing.T, device string, want []byte) {
	t.Helper()
	all, err := os.ReadFile(device)
	check(t, err)
	if !bytes.Equal(all[VarsOffset:VarsOffset+len(want)], want) {
		t.Errorf("%s does not hold the UEFI variables that it should", device)
	}
}

// TestKeepVars: KeepVars writes the template once. What the guest writes stays, even if the template has changed, until
// its headers are damaged, the template has another size or the image is copied again.
func TestKeepVars(t *testing.T) {
	device, _ := loop(t, 8*chunk)
	src := image(1, 3*chunk)
	first, err := Prepare(t.Context(), device, src, OverwriteNever)
	check(t, err)
	keep := func(id string, vars []byte, replaced uint64) {
		t.Helper()
		if got, err := KeepVars(t.Context(), device, id, vars); err != nil || got != replaced {
			t.Errorf("KeepVars = %d, %v; want %d bytes replaced", got, err, replaced)
		}
		check(t, Check(device, id, uint64(len(vars))))
	}
	small, large := template(1, 128<<10), template(2, 528<<10)
	keep(first.ID, small, 0)
	checkVars(t, device, small)
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	check(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("the guest's"), VarsOffset+varsHeaders)
	check(t, err)
	// A machine that runs does not hinder the next container's creation.
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 201, Len: 1}
	check(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock))
	keep(first.ID, append(bytes.Clone(small[:varsHeaders]), template(3, 128<<10-varsHeaders)...), 0)
	checkVars(t, device, slices.Concat(small[:varsHeaders], []byte("the guest's"), small[varsHeaders+11:]))
	if _, err := KeepVars(t.Context(), device, first.ID, large); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("KeepVars with a larger template while a machine runs: got error %v, want ErrFailedPrecondition", err)
	}
	lock.Type = unix.F_UNLCK
	check(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock))
	_, err = f.WriteAt([]byte("\xff\xff"), VarsOffset+varsHeaders-2)
	check(t, err)
	keep(first.ID, small, 128<<10)
	checkVars(t, device, small)
	keep(first.ID, large, 128<<10)
	checkVars(t, device, large)
	if err := Check(device, first.ID, 128<<10); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check with the earlier size: got error %v, want ErrFailedPrecondition", err)
	}
	checkDisk(t, device, src)
	next, err := Prepare(t.Context(), device, image(2, 3*chunk), OverwriteImage)
	check(t, err)
	if _, err := KeepVars(t.Context(), device, first.ID, large); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("KeepVars for the overwritten disk: got error %v, want ErrFailedPrecondition", err)
	}
	keep(next.ID, small, 0)
	checkVars(t, device, small)
}

// TestVarsFit: only templates of whole sectors fit that end in front of the guest's disk.
func TestVarsFit(t *testing.T) {
	for size, want := range map[int]bool{0: false, 512: true, 1000: false, 128 << 10: true, 540672: true, 768 << 10: true,
		768<<10 + 512: false} {
		if got := VarsFit(size); got != want {
			t.Errorf("VarsFit(%d) = %t, want %t", size, got, want)
		}
	}
	device, _ := loop(t, 8*chunk)
	if _, err := KeepVars(t.Context(), device, "", make([]byte, 1000)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("KeepVars with 1000 bytes: got error %v, want ErrInvalidArgument", err)
	}
}

// TestEarlierMark: the mark of an earlier release, without the field for the variables, means that there are none.
func TestEarlierMark(t *testing.T) {
	raw := mark{Magic: magic, Version: version, Stage: stageComplete, VarsSize: 528 << 10}.encode()
	const fields = 16 + 4 + 4 + 16 + 8 + maxImage // of the earlier mark
	clear(raw[fields:])
	binary.LittleEndian.PutUint32(raw[markSize-4:], crc32.Checksum(raw[:markSize-4], castagnoli))
	if m, found, err := decode(raw); err != nil || !found || m.VarsSize != 0 {
		t.Errorf("decode = %+v, %t, %v; want a mark without variables", m, found, err)
	}
}

// TestV4VarsPowerLoss: the power fails at every write and sync while the UEFI variables are written, for the first time
// and over those of another firmware. Afterwards the disk is complete, its variables are whole or missing, and a
// repeated call writes them.
func TestV4VarsPowerLoss(t *testing.T) {
	src, earlier, next := image(1, chunk+512), template(1, 128<<10), template(2, 528<<10)
	for name, before := range map[string][]byte{"none before": nil, "another firmware": earlier} {
		t.Run(name, func(t *testing.T) {
			for calls, done := 0, false; !done; calls++ {
				for seed := range uint64(4) {
					dev := newCrashDevice(3 * chunk)
					dev.random = rand.New(rand.NewPCG(seed, uint64(calls)))
					d, err := prepare(t.Context(), dev, src, OverwriteNever)
					check(t, err)
					if before != nil {
						err = rewriteVars(t, dev, d.ID, before)
						check(t, err)
					}
					dev.calls = calls
					err = rewriteVars(t, dev, d.ID, next)
					if done = err == nil; !done && !errors.Is(err, errPower) {
						t.Fatal(err)
					}
					dev.losePower()
					checkWhole(t, dev, d.ID, earlier, next)
					if err := rewriteVars(t, dev, d.ID, next); err != nil {
						t.Fatalf("writeVars after a power loss at call %d: %v", calls, err)
					}
					checkWhole(t, dev, d.ID, next)
					checkComplete(t, dev, src)
				}
			}
		})
	}
}

// rewriteVars is KeepVars without the search for a device.
func rewriteVars(t *testing.T, dev *crashDevice, id string, template []byte) error {
	m, kept, err := findVars(dev, id, template)
	if err != nil || kept {
		return err
	}
	return writeVars(t.Context(), dev, m, template)
}

// checkWhole checks that a device with UEFI variables holds all of one of the templates.
func checkWhole(t *testing.T, dev *crashDevice, id string, templates ...[]byte) {
	t.Helper()
	m, err := checkedMark(dev, id)
	check(t, err)
	if m.VarsSize == 0 && len(templates) > 1 {
		return
	}
	for _, want := range templates {
		if bytes.Equal(dev.seen[VarsOffset:VarsOffset+m.VarsSize], want) {
			return
		}
	}
	t.Fatalf("the %d bytes of UEFI variables are of no template", m.VarsSize)
}
