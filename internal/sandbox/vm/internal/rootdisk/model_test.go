package rootdisk

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
)

// errPower is what every call says once the power is gone.
var errPower = errors.New("no power")

// fragile is a device with a write cache: what was not synced when the power goes is there in part, in any order.
type fragile struct {
	durable, seen []byte
	pending       []write
	// calls is how many writes and syncs there are until the power goes; negative: it stays.
	calls  int
	random *rand.Rand
}

type write struct {
	at   int64
	data []byte
}

func newFragile(size int) *fragile {
	return &fragile{durable: make([]byte, size), seen: make([]byte, size), calls: -1, random: rand.New(rand.NewPCG(1, 2))}
}

func (f *fragile) spend() error {
	if f.calls == 0 {
		return errPower
	}
	f.calls--
	return nil
}

func (f *fragile) ReadAt(p []byte, at int64) (int, error) {
	return bytes.NewReader(f.seen).ReadAt(p, at)
}

func (f *fragile) WriteAt(p []byte, at int64) (int, error) {
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

func (f *fragile) Zero(at, length int64) error {
	_, err := f.WriteAt(make([]byte, length), at)
	return err
}

func (f *fragile) Sync() error {
	if err := f.spend(); err != nil {
		return err
	}
	copy(f.durable, f.seen)
	f.pending = nil
	return nil
}

func (f *fragile) Size() int64 { return int64(len(f.seen)) }

// lose is the loss of power and its return: of what was not synced, some sectors are on the disk.
func (f *fragile) lose() {
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

// image is a disk of a few chunks with holes.
func image(seed uint64, size int) Source {
	disk := make([]byte, size)
	random := rand.NewChaCha8([32]byte{byte(seed)})
	for at := 0; at+chunk/2 <= size; at += 2 * chunk {
		_, _ = random.Read(disk[at : at+chunk/2])
	}
	return Source{Image: "image of " + string(rune('a'+seed)), File: bytes.NewReader(disk), FileSize: int64(size), Format: "raw", Size: uint64(size)}
}

func (s Source) bytes(t *testing.T) []byte {
	t.Helper()
	all := make([]byte, s.FileSize)
	if _, err := s.File.ReadAt(all, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return all
}

// TestV4PowerLoss: the power goes at every write and every sync of a copy, onto an empty device and over another image's disk;
// what is complete afterwards is whole, and a copy that is begun again ends well.
func TestV4PowerLoss(t *testing.T) {
	old, next := image(1, chunk+512), image(2, 3*chunk+1024)
	for name, dirty := range map[string]bool{"empty": false, "over another": true} {
		t.Run(name, func(t *testing.T) {
			for calls := 0; ; calls++ {
				done := false
				for seed := range uint64(2) {
					dev := newFragile(5 * chunk)
					dev.random = rand.New(rand.NewPCG(seed, uint64(calls)))
					if dirty {
						if _, err := prepare(t.Context(), dev, old, OverwriteNever); err != nil {
							t.Fatal(err)
						}
					}
					dev.calls = calls
					_, err := prepare(t.Context(), dev, next, OverwriteImage)
					done = err == nil
					if !done && !errors.Is(err, errPower) {
						t.Fatal(err)
					}
					dev.lose()
					wantWhole(t, dev, old, next)
					if d, err := prepare(t.Context(), dev, next, OverwriteImage); err != nil || d.Image != next.Image {
						t.Fatalf("after a loss of power at call %d: %+v, %v", calls, d, err)
					}
					wantWhole(t, dev, next)
				}
				if done {
					return
				}
			}
		})
	}
}

// wantWhole checks that a device whose mark says complete has all of one of the images.
func wantWhole(t *testing.T, dev *fragile, images ...Source) {
	t.Helper()
	m, there, err := read(dev)
	if err != nil {
		t.Fatal(err)
	}
	if !there || m.Stage != stageComplete {
		return
	}
	for _, s := range images {
		if m.image() == s.Image {
			if !bytes.Equal(dev.seen[Offset:Offset+s.Size], s.bytes(t)) {
				t.Fatalf("the disk of %q is complete and not whole", s.Image)
			}
			return
		}
	}
	t.Fatalf("complete with the image %q", m.image())
}
