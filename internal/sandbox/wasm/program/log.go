package program

import (
	"fmt"
	"os"
)

// maxLog bounds the worker's log, in bytes. Every minute, the daemon trims a log of more than half this size. In
// between, and while no daemon runs, only maxLog keeps clients from filling the disk: they can cause any number of
// failed requests, and each failure is logged.
const maxLog = 16 << 20

// boundedLog appends lines to a file of at most limit bytes. It drops and counts further lines. slog writes one line at
// a time.
type boundedLog struct {
	file  *os.File
	limit int64
	lost  int
}

func (l *boundedLog) Write(line []byte) (int, error) {
	out := line
	if l.lost > 0 {
		out = fmt.Appendf(nil, "{\"level\":\"WARN\",\"msg\":\"lines lost while the log was full\",\"lines\":%d}\n%s", l.lost, line)
	}
	if info, err := l.file.Stat(); err == nil && info.Mode().IsRegular() && info.Size()+int64(len(out)) > l.limit {
		l.lost++
		return len(line), nil
	}
	if _, err := l.file.Write(out); err != nil {
		return 0, err
	}
	l.lost = 0
	return len(line), nil
}
