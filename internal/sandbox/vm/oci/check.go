package oci

import (
	"context"
	"errors"
	"fmt"
	"os/exec"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// Check looks for what pods of OCI containers need beside QEMU. The finding is not required, because disk machines need
// none of it.
func Check(ctx context.Context, c vm.Config) health.Finding {
	f := health.Finding{Subject: "vm-oci", Detail: guestFilesOf(c).dir,
		Remedy: "install the guest (make install-guest) or set vm.guest_dir, and install virtiofsd, erofs-utils and e2fsprogs; without the guest there is no handler \"vm-oci\", and without the programs it has no new pods; without coreutils there are no templates"}
	err := errors.Join(guestFilesOf(c).check(), checkTools(c))
	if c.VM.Templates > 0 {
		err = errors.Join(err, qemu.CheckCopy(ctx))
	}
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK = true
	return f
}

// checkTools returns errdefs.ErrNotFound if a program is missing that pods of OCI containers need beside QEMU.
func checkTools(c vm.Config) error {
	if _, err := virtiofsd.Find(c.VM.Virtiofsd); err != nil {
		return err
	}
	for program, pkg := range map[string]string{"mkfs.erofs": "erofs-utils", "mke2fs": "e2fsprogs"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is missing (Debian: %s): %w: %w", program, pkg, err, errdefs.ErrNotFound)
		}
	}
	return nil
}
