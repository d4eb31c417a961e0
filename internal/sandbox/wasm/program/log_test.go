package program

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// TestFaultC10WorkerLog checks that the worker's log stays within its limit however much it logs, and that after
// truncation logging continues with a line about the lost lines.
func TestFaultC10WorkerLog(t *testing.T) {
	file, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	const most = 10 << 10
	log := slog.New(slog.NewJSONHandler(&boundedLog{file: file, limit: most}, nil))
	for range 1000 {
		log.Error("request failed", "err", "trap")
	}
	info, err := file.Stat()
	if err != nil || info.Size() > most || info.Size() < most/2 {
		t.Fatalf("size of the log = %d, %v; want at most %d", info.Size(), err, most)
	}
	if err := file.Truncate(0); err != nil {
		t.Fatal(err)
	}
	log.Error("again")
	log.Error("and again")
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(text, []byte("lines lost while the log was full")) || bytes.Count(text, []byte("again")) != 2 ||
		bytes.Count(text, []byte("\n")) != 3 {
		t.Errorf("log after truncation = %s", text)
	}
}

// TestShortLineInAFullLog: a line that would fit alone is dropped if it does not fit with the count of lost lines.
func TestShortLineInAFullLog(t *testing.T) {
	file, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	log := &boundedLog{file: file, limit: 100}
	for _, n := range []int{90, 20, 10} {
		if got, err := log.Write(bytes.Repeat([]byte("x"), n)); got != n || err != nil {
			t.Fatalf("Write of %d bytes: got %d, error %v", n, got, err)
		}
	}
	if info, err := file.Stat(); err != nil || info.Size() != 90 || log.lost != 2 {
		t.Errorf("size of the log = %d, %v, with %d lines lost; want 90 with 2 lines lost", info.Size(), err, log.lost)
	}
}
