package harness

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// LogLine is a line of a container's log file in CRI format: TIME STREAM TAGS TEXT.
type LogLine struct {
	Time   time.Time
	Stream string // stdout or stderr
	// Partial is set if the program's line continues in the next entry of this stream (tag P, not F).
	Partial bool
	Text    string
}

// ParseLog parses a log file, strictly.
func ParseLog(data string) ([]LogLine, error) {
	var lines []LogLine
	for raw := range strings.Lines(data) {
		f := strings.SplitN(strings.TrimSuffix(raw, "\n"), " ", 4)
		if len(f) != 4 || !strings.HasSuffix(raw, "\n") {
			return lines, fmt.Errorf("not a line in CRI format: %q", raw)
		}
		at, err := time.Parse(time.RFC3339Nano, f[0])
		if err != nil {
			return lines, fmt.Errorf("%w in %q", err, raw)
		}
		if (f[1] != "stdout" && f[1] != "stderr") || (f[2] != "F" && f[2] != "P") {
			return lines, fmt.Errorf("unknown stream or tag in %q", raw)
		}
		lines = append(lines, LogLine{Time: at, Stream: f[1], Partial: f[2] == "P", Text: f[3]})
	}
	return lines, nil
}

// ReadLog reads and parses a log file.
func ReadLog(t testing.TB, path string) []LogLine {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := ParseLog(string(data))
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return lines
}

// Text returns what a program wrote to a stream; "" selects both streams.
func Text(lines []LogLine, stream string) string {
	var b strings.Builder
	for _, l := range lines {
		if stream != "" && l.Stream != stream {
			continue
		}
		b.WriteString(l.Text)
		if !l.Partial {
			b.WriteByte('\n')
		}
	}
	return b.String()
}
