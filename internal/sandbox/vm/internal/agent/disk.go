package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/iso9660"
)

const (
	// ProgramName is the name of the guest's program, on the host and on its disk.
	ProgramName = "tripod-agent"
	// Label is the volume label of the disk by which a guest finds it.
	Label = "TRIPODAGENT"
)

// FindProgram looks for tripod-agent beside the executable of this process and then in PATH: errdefs.ErrNotFound.
func FindProgram() (string, error) {
	return process.FindProgram(ProgramName, "for guests")
}

// Disk makes the image of a small read-only disk (ISO 9660 with Rock Ridge) that is labelled Label and holds program as
// /tripod-agent, executable. It is in dir, named after its content, made when it is not there; machines may use an older one still.
func Disk(dir, program string) (path string, err error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return "", fmt.Errorf("disk with the guest's program: %w", err)
	}
	sum := sha256.Sum256(content)
	path = filepath.Join(dir, "agent-"+hex.EncodeToString(sum[:16])+".iso")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	image, err := iso9660.Build(Label, []iso9660.File{{Path: ProgramName, Data: content, Mode: 0o555}})
	if err != nil {
		return "", fmt.Errorf("disk with the guest's program: %w", err)
	}
	if err := write(dir, path, image); err != nil {
		return "", fmt.Errorf("disk with the guest's program: %w", err)
	}
	return path, nil
}

// write makes a file that is whole or not there, after a power loss too.
func write(dir, path string, content []byte) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".agent-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o444), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
