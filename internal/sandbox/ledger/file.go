package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Format is the version of a kind's state files: the field "version" of each, which the kind's own structs do not have.
type Format int

// Read reads a state file into v. A file that is missing, or torn by a crash of the node, is errdefs.ErrNotFound. A file of
// another version is errdefs.ErrFailedPrecondition: this program cannot manage what it describes, and must leave it alone.
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
		return fmt.Errorf("%s is of version %d, this program writes version %d: %w", path, head.Version, f, errdefs.ErrFailedPrecondition)
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("%s is damaged (%v): %w", path, err, errdefs.ErrNotFound)
	}
	return nil
}

// Write replaces the state file at path by v, a struct with at least one field. It does not sync: after a crash of the daemon the
// page cache is there, and after one of the node nothing of the container runs.
func (f Format) Write(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return ReplaceFile(path, append(fmt.Appendf(nil, `{"version":%d,`, f), raw[1:]...), 0o600)
}

// WriteJSON replaces the file at path by v as JSON, for others to read.
func WriteJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return ReplaceFile(path, raw, 0o600)
}

// ReplaceFile replaces a file at once: a reader, or a crash of this process, sees the old content or the new one. Its errors have
// the class that sandbox.DiskError gives them.
func ReplaceFile(path string, content []byte, mode fs.FileMode) error {
	draft := path + ".new"
	err := os.WriteFile(draft, content, mode)
	if err == nil {
		err = os.Chmod(draft, mode) // whatever our umask is
	}
	if err == nil {
		err = os.Rename(draft, path)
	}
	return sandbox.DiskError(err)
}

// RemoveFile removes a file, or an empty directory; a missing one is no error.
func RemoveFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
