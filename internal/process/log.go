package process

import (
	"errors"
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

// TrimLog shortens a log that is larger than the given limit, and keeps only the given number of bytes at its end.
// Programs that have the log open for appending continue at its new end. What they write during TrimLog may be lost.
func TrimLog(path string, limit, keep int64) error {
	info, err := os.Stat(path)
	if err != nil || info.Size() <= limit {
		return err
	}
	end := LogTail(path, keep)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.Write(end)
	}
	return errors.Join(err, f.Close())
}
