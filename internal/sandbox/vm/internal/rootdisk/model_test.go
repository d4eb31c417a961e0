package rootdisk

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
)

// errPower is the error of every call after the power loss.
var errPower = errors.New("no power")

// crashDevice is a device with a write cache. A power loss keeps a random part of the writes that were not synced.
type crashDevice struct {
	durable, seen []byte
	pending       []write
	// calls is the number of writes and syncs until the power loss; negative means never.
	calls  int
	random *rand.Rand
}

type write struct {
	at   int64
	data []byte
}

func newCrashDevice(size int) *crashDevice {
	return &crashDevice{durable: make([]byte, size), seen: make([]byte, size), calls: -1, random: rand.New(rand.NewPCG(1, 2))}
}

func (f *crashDevice) spend() error {
	if f.calls == 0 {
		return errPower
	}
	f.calls--
	return nil
}

func (f *crashDevice) ReadAt(p []byte, at int64) (int, error) {
	return bytes.NewReader(f.seen).ReadAt(p, at)
}

func (f *crashDevice) WriteAt(p []byte, at int64) (int, error) {
	if err := f.spend(); err != nil {
		return 0, err
	}
	if at < 0 || at+int64(len(p)) > int64(len(f.seen)) {
		return 0, io.ErrShortWrite
	}
	copy(f.seen[at:], p)
	f.pending = append(f.pending, write{at, bytes.Clone(p)})
	return len(p), nil
}

func (f *crashDevice) Zero(at, length int64) error {
	_, err := f.WriteAt(make([]byte, length), at)
	return err
}

func (f *crashDevice) Sync() error {
	if err := f.spend(); err != nil {
		return err
	}
	copy(f.durable, f.seen)
	f.pending = nil
	return nil
}

func (f *crashDevice) Size() int64 { return int64(len(f.seen)) }

// losePower simulates a power loss and its end: some sectors of unsynced writes are on the disk.
func (f *crashDevice) losePower() {
	const sector = 512
	for _, w := range f.pending {
		for from := 0; from < len(w.data); from += sector {
			if f.random.IntN(2) == 0 {
				copy(f.durable[w.at+int64(from):], w.data[from:min(from+sector, len(w.data))])
			}
		}
	}
	f.pending, f.calls = nil, -1
	copy(f.seen, f.durable)
}

// image returns a disk of a few chunks with holes.
func image(seed uint64, size int) Source {
	disk := make([]byte, size)
	random := rand.NewChaCha8([32]byte{byte(seed)})
	for at := 0; at+chunk/2 <= size; at += 2 * chunk {
		_, _ = random.Read(disk[at : at+chunk/2])
	}
	return Source{Image: "image of " + string(rune('a'+seed)), File: bytes.NewReader(disk), FileSize: int64(size), Format: "raw",
		Size: uint64(size)}
}

func (s Source) bytes(t *testing.T) []byte {
	t.Helper()
	all := make([]byte, s.FileSize)
	if _, err := s.File.ReadAt(all, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return all
}

// TestV4PowerLoss: the power fails at every write and sync of a copy, to an empty device and over another image's disk.
// Afterwards a complete disk is intact, and a restarted copy succeeds.
func TestV4PowerLoss(t *testing.T) {
	old, next := image(1, chunk+512), image(2, 3*chunk+1024)
	for name, dirty := range map[string]bool{"empty": false, "over another image": true} {
		t.Run(name, func(t *testing.T) {
			for calls := 0; ; calls++ {
				done := false
				for seed := range uint64(2) {
					dev := newCrashDevice(5 * chunk)
					dev.random = rand.New(rand.NewPCG(seed, uint64(calls)))
					if dirty {
						d, err := prepare(t.Context(), dev, old, OverwriteNever)
						if err != nil {
							t.Fatal(err)
						}
						if err := rewriteVars(t, dev, d.ID, template(1, 512)); err != nil {
							t.Fatal(err)
						}
					}
					dev.calls = calls
					_, err := prepare(t.Context(), dev, next, OverwriteImage)
					done = err == nil
					if !done && !errors.Is(err, errPower) {
						t.Fatal(err)
					}
					dev.losePower()
					checkComplete(t, dev, old, next)
					if d, err := prepare(t.Context(), dev, next, OverwriteImage); err != nil || d.Image != next.Image {
						t.Fatalf("prepare after a power loss at call %d = %+v, %v; want image %q", calls, d, err, next.Image)
					}
					checkComplete(t, dev, next)
					if m, _, err := readMark(dev); err != nil || m.VarsSize != 0 {
						t.Fatalf("mark of a new copy = %+v, %v; want no UEFI variables", m, err)
					}
				}
				if done {
					return
				}
			}
		})
	}
}

// checkComplete checks that a device whose mark says complete holds all of one of the images.
func checkComplete(t *testing.T, dev *crashDevice, images ...Source) {
	t.Helper()
	m, found, err := readMark(dev)
	if err != nil {
		t.Fatal(err)
	}
	if !found || m.Stage != stageComplete {
		return
	}
	for _, s := range images {
		if m.image() == s.Image {
			if !bytes.Equal(dev.seen[Offset:Offset+s.Size], s.bytes(t)) {
				t.Fatalf("the disk of %q is marked complete, but differs from the image", s.Image)
			}
			return
		}
	}
	t.Fatalf("the mark names the image %q, want another", m.image())
}
