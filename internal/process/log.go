package process

import (
	"io"
	"os"
)

// LogTail is the end of the log that a process appends to, at most n bytes; nil when it cannot be read.
func LogTail(path string, n int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	raw, _ := io.ReadAll(io.LimitReader(f, n))
	return raw
}
