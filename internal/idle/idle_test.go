package idle

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

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
	before := mapped(t, file)
	if err := unmap(file); err != nil {
		t.Fatal(err)
	}
	if after := mapped(t, file); before-after != len(content) {
		t.Errorf("%d bytes left memory, want %d", before-after, len(content))
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

// mapped returns how many bytes of the file's mappings are in memory.
func mapped(t *testing.T, file string) (total int) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	var of bool
	for line := range strings.Lines(string(smaps)) {
		switch fields := strings.Fields(line); {
		case !strings.HasSuffix(fields[0], ":"):
			of = strings.HasSuffix(line, file+"\n")
		case of && fields[0] == "Rss:":
			var kib int
			if _, err := fmt.Sscan(fields[1], &kib); err != nil {
				t.Fatal(err)
			}
			total += kib << 10
		}
	}
	return total
}
