package process

import (
	"io"
	"os"
)

// LogTail returns at most the last n bytes of a log file, or nil if the file cannot be read.
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
