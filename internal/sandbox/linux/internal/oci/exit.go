package oci

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// ReadExit returns the exit code in an exit file and the file's modification time. The code is 128 + N if signal N
// killed the program.
func ReadExit(name string) (code int32, at time.Time, err error) {
	raw, err := os.ReadFile(name)
	if err != nil {
		return 0, time.Time{}, err
	}
	info, err := os.Stat(name)
	n, parseErr := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 32)
	if err := errors.Join(err, parseErr); err != nil {
		return 0, time.Time{}, fmt.Errorf("exit file %s: %w", name, err)
	}
	return int32(n), info.ModTime(), nil
}
