package program

import (
	"fmt"
	"os"
)

// maxLog is how large the worker's log may get, in bytes. The daemon trims the log at half of that, once a minute. This bound
// holds in between and while the daemon is away: each failed request writes a line, and clients can cause any number of those.
const maxLog = 16 << 20

// boundedLog appends lines to a file while it has at most most bytes, and drops and counts the others. slog writes one line at a
// time.
type boundedLog struct {
	file *os.File
	most int64
	lost int
}

func (l *boundedLog) Write(line []byte) (int, error) {
	if info, err := l.file.Stat(); err == nil && info.Mode().IsRegular() && info.Size()+int64(len(line)) > l.most {
		l.lost++
		return len(line), nil
	}
	if l.lost > 0 {
		if _, err := fmt.Fprintf(l.file, "{\"level\":\"WARN\",\"msg\":\"lines are lost since the log was full\",\"lines\":%d}\n", l.lost); err != nil {
			return 0, err
		}
		l.lost = 0
	}
	return l.file.Write(line)
}
