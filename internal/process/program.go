package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containerd/errdefs"
)

// FindProgram finds one of our programs in the directory of this process's executable, or otherwise in PATH. If the
// program is in neither place, FindProgram returns an errdefs.ErrNotFound that mentions the purpose, such as "for
// guests".
func FindProgram(name, purpose string) (string, error) {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if _, err := exec.LookPath(beside); err == nil {
			return beside, nil
		}
	}
	found, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s, the program %s, is neither beside this program nor in PATH: %w", name, purpose, errdefs.ErrNotFound)
	}
	return filepath.Abs(found)
}
