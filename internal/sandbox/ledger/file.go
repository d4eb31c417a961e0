package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Format is the version of a backend's state files. Read checks the files' field "version", and Write adds it, so the
// backend's structs do not have that field.
type Format int

// Read reads a state file into v. It returns errdefs.ErrNotFound for a file that is missing, or was damaged by a crash
// of the node. It returns errdefs.ErrFailedPrecondition for a file of another version. In the latter case, the daemon
// must leave the container alone.
func (f Format) Read(path string, v any) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return err
	}
	var head struct {
		Version Format `json:"version"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return fmt.Errorf("%s is damaged (%v): %w", path, err, errdefs.ErrNotFound)
	}
	if head.Version != f {
		return fmt.Errorf("%s has version %d, this program needs version %d: %w", path, head.Version, f, errdefs.ErrFailedPrecondition)
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("%s is damaged (%v): %w", path, err, errdefs.ErrNotFound)
	}
	return nil
}

// Write replaces the state file at path with v, a struct with at least one field. It does not sync the file: the page
// cache survives a crash of the daemon, and after a crash of the node the content does not matter, because the
// container no longer runs.
func (f Format) Write(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return ReplaceFile(path, append(fmt.Appendf(nil, `{"version":%d,`, f), raw[1:]...), 0o600)
}

// WriteJSON replaces the file at path with the JSON encoding of v, for other programs to read.
func WriteJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return ReplaceFile(path, raw, 0o600)
}

// ReplaceFile calls atomicfile.Replace. Errors get a class from sandbox.DiskError.
func ReplaceFile(path string, content []byte, mode fs.FileMode) error {
	return sandbox.DiskError(atomicfile.Replace(path, content, mode))
}

// RemoveFile removes a file or an empty directory. It does nothing if the path does not exist.
func RemoveFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Exists reports whether there is something at path, which may be a dangling link.
func Exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
