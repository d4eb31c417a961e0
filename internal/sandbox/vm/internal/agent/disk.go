package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/iso9660"
)

const (
	// ProgramName is the name of the guest's program, on the host and on the disk.
	ProgramName = "tripod-agent"
	// Label is the disk's volume label. A guest finds the disk by this label.
	Label = "TRIPODAGENT"
)

// FindProgram looks for tripod-agent beside this process's executable and in PATH, and returns the program's path. It
// returns errdefs.ErrNotFound if the program is missing.
func FindProgram() (string, error) {
	return process.FindProgram(ProgramName, "for guests")
}

// Disk makes the image of a read-only disk (ISO 9660 with Rock Ridge) in the directory dir, and returns the image's
// path. The disk has the label Label, and holds the given program as /tripod-agent. The name of the image file depends
// on the content. Disk neither replaces an existing image nor removes older images, because machines may still use
// them.
func Disk(dir, program string) (path string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make the disk with the guest's program: %w", err)
		}
	}()
	content, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	path = filepath.Join(dir, "agent-"+hex.EncodeToString(sum[:16])+".iso")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	image, err := iso9660.Build(Label, []iso9660.File{{Path: ProgramName, Data: content, Mode: 0o555}})
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return path, atomicfile.Write(path, image, 0o444)
}
