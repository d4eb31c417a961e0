package image

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// storeWithImages opens a store whose index has n images; Get and List use only the index.
func storeWithImages(b *testing.B, n int) *Store {
	s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
	for i := range n {
		dgst := digest.FromString(fmt.Sprint(i))
		d := &details{id: dgst.String(), kind: KindRootfs, size: 1 << 20, manifest: ocispec.Descriptor{Digest: dgst},
			chain: []digest.Digest{dgst}}
		s.index.put(d, nil, fmt.Sprintf("registry.example/team/app%d:1.2.3", i), fmt.Sprintf("registry.example/team/app%d@%s", i, dgst))
	}
	return s
}

func BenchmarkGet(b *testing.B) {
	s := storeWithImages(b, 500)
	for _, called := range []string{"registry.example/team/app250:1.2.3", digest.FromString("250").String(),
		digest.FromString("250").Encoded()[:12]} {
		b.Run(called[:12], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Get(b.Context(), called); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkList(b *testing.B) {
	s := storeWithImages(b, 500)
	b.ReportAllocs()
	for b.Loop() {
		if all, err := s.List(b.Context()); err != nil || len(all) != 500 {
			b.Fatalf("List() = %d images, %v; want 500", len(all), err)
		}
	}
}

// BenchmarkPrepare measures Prepare, part of every container's start. Release is needed for the next iteration.
func BenchmarkPrepare(b *testing.B) {
	reg := newRegistry(b)
	s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
	img := pull(b, s, reg.push(b, "app:1", oneFileImage(b, "x")))
	i := 0
	for b.Loop() {
		key := fmt.Sprintf("c%d", i)
		i++
		if _, err := s.Prepare(b.Context(), key, img.ID, nil); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := s.Release(b.Context(), key); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkPrepareParallel(b *testing.B) {
	reg := newRegistry(b)
	s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
	img := pull(b, s, reg.push(b, "app:1", oneFileImage(b, "x")))
	var keys = make(chan int, 1)
	keys <- 0
	b.SetParallelism(5)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			i := <-keys
			keys <- i + 1
			if _, err := s.Prepare(b.Context(), fmt.Sprintf("c%d", i), img.ID, nil); err != nil {
				b.Error(err)
			}
		}
	})
}

func BenchmarkUsage(b *testing.B) {
	reg := newRegistry(b)
	s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
	img := pull(b, s, reg.push(b, "app:1", oneFileImage(b, "x")))
	if _, err := s.Prepare(b.Context(), "c", img.ID, nil); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Usage(b.Context(), "c"); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPullAgain measures pulling an existing image, as with imagePullPolicy Always.
func BenchmarkPullAgain(b *testing.B) {
	reg := newRegistry(b)
	s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
	ref := reg.push(b, "app:1", oneFileImage(b, "x"))
	pull(b, s, ref)
	for b.Loop() {
		pull(b, s, ref)
	}
}

// BenchmarkPull measures a first pull of an image of 200 MB in 12 compressed layers, each of 400 files.
func BenchmarkPull(b *testing.B) {
	random := rand.NewChaCha8([32]byte{})
	var layers [][]byte
	for l := range 12 {
		var files []entryOf
		for f := range 400 {
			body := make([]byte, 44<<10)
			_, _ = random.Read(body[:40<<10]) // the rest compresses well
			files = append(files, file(fmt.Sprintf("layer%d/dir%d/file%d", l, f/20, f), string(body)))
		}
		layers = append(layers, tarOf(b, files...))
	}
	reg := newRegistry(b)
	ref := raw(b, layers...).push(b, reg, "big")
	b.SetBytes(200 << 20)
	for b.Loop() {
		b.StopTimer()
		s := open(b, Config{Logger: slog.New(slog.DiscardHandler)})
		b.StartTimer()
		pull(b, s, ref)
	}
}
