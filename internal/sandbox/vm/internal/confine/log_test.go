package confine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLogsAreBounded: TrimLog keeps the end of a log, and LastWords returns its last lines.
func TestLogsAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qemu.log")
	if err := os.WriteFile(path, []byte(strings.Repeat("noise\n", maxLog/3)+"qemu-system-x86_64: it is on fire\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	TrimLog(path)
	if info, err := os.Stat(path); err != nil || info.Size() > keepLog {
		t.Errorf("the trimmed log has %d bytes, error %v; want at most %d", info.Size(), err, keepLog)
	}
	if words := LastWords(path, "qemu-system-x86_64"); words != "noise; noise; it is on fire" {
		t.Errorf("LastWords = %q, want the last three lines", words)
	}
}
