package console

import (
	"fmt"
	"os"
	"strings"
)

// LastWords returns the end of a serial log, for an error message.
func LastWords(serialLog string) string {
	const most = 1 << 10
	f, err := os.Open(serialLog)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return ""
	}
	tail := make([]byte, min(most, info.Size()))
	n, _ := f.ReadAt(tail, info.Size()-int64(len(tail)))
	return fmt.Sprintf("; the guest's console ends with %q", strings.ToValidUTF8(string(tail[:n]), "?"))
}
