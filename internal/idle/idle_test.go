package idle

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestDue: memory is given back in the first idle interval, and then when it has more than doubled.
func TestDue(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name        string
		used        time.Duration
		held, least int64
		want        bool
	}{
		{"first idle interval", 0, 10 * mib, 0, true},
		{"almost busy", quiet - 1, 10 * mib, 0, true},
		{"busy", quiet, 10 * mib, 0, false},
		{"as large as after the last time", 0, 10 * mib, 10 * mib, false},
		{"twice as large", 0, 20 * mib, 10 * mib, false},
		{"more than twice as large", 0, 20*mib + 1, 10 * mib, true},
		{"more than twice as large, but busy", quiet, 40 * mib, 10 * mib, false},
	} {
		if got := due(c.used, c.held, c.least); got != c.want {
			t.Errorf("%s: due = %t, want %t", c.name, got, c.want)
		}
	}
}

// TestRelease gives back memory of the running program.
func TestRelease(t *testing.T) {
	for range 3 {
		if err := Release(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUnmap checks that only unmodified pages of the file leave memory.
func TestUnmap(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a program") // the name in smaps has spaces, too
	content := bytes.Repeat([]byte("content "), 1<<17)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	clean, modified, writable := mapping(t, file), mapping(t, file), mapping(t, file)
	for _, m := range [][]byte{modified, writable} {
		m[0] = 'C'
	}
	for _, m := range [][]byte{clean, modified} {
		if err := unix.Mprotect(m, unix.PROT_READ); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(clean, content) { // which has mapped each page
		t.Fatal("the mapping has another content")
	}
	if got := mapped(t, clean); got == 0 {
		t.Fatal("the mapping has no pages in memory")
	}
	if err := unmap(file); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, clean); got != 0 {
		t.Errorf("the mapping has %d KiB in memory, want none", got)
	}
	if !bytes.Equal(clean, content) {
		t.Error("a page has another content")
	}
	if modified[0] != 'C' || writable[0] != 'C' {
		t.Error("a modified page is lost")
	}
}

// mapping maps the whole file.
func mapping(t *testing.T, file string) []byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

// mapped returns how many KiB of the mapping are in memory.
func mapped(t *testing.T, mapping []byte) (kib int) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(smaps), fmt.Sprintf("%x-", uintptr(unsafe.Pointer(&mapping[0]))))
	_, rest, resident := strings.Cut(rest, "\nRss:")
	if _, err := fmt.Sscan(rest, &kib); err != nil || !found || !resident {
		t.Fatalf("the mapping is not in smaps: %v", err)
	}
	return kib
}
