package wasm

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// wantedMounts returns the mounts for the guest. It omits the files that a kubelet mounts into every container, because
// no guest can use them.
func wantedMounts(config *runtimeapi.ContainerConfig) []*runtimeapi.Mount {
	kubelets := []string{"/etc/hosts", sandbox.TerminationMessagePath(config)}
	return slices.DeleteFunc(slices.Clone(config.GetMounts()), func(m *runtimeapi.Mount) bool {
		return slices.Contains(kubelets, path.Clean(m.GetContainerPath())) && !isDirectory(m.GetHostPath())
	})
}

func isDirectory(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// checkMounts returns the mounts for the guest after checking that they are directories.
func checkMounts(config *runtimeapi.ContainerConfig) ([]*runtimeapi.Mount, error) {
	opened, err := openMounts(config)
	closeMounts(opened)
	if err != nil {
		return nil, err
	}
	return wantedMounts(config), nil
}

// openMounts opens the directories that a container mounts. It returns nested paths before their parents. A mount of a
// file is an error, because WASI cannot mount files.
func openMounts(config *runtimeapi.ContainerConfig) (opened []workerapi.Mount, err error) {
	defer func() {
		if err != nil {
			closeMounts(opened)
			opened = nil
		}
	}()
	for i, m := range wantedMounts(config) {
		field := fmt.Sprintf("mounts[%d]", i)
		dir, err := launch.OpenMount(m.GetHostPath(), m.GetReadonly(), resolveOf(config))
		switch {
		case errors.Is(err, unix.ENOTDIR):
			return opened, fields.Invalid(field+".host_path", "%s is not a directory; components can mount only directories, so mount its parent",
				m.GetHostPath())
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EACCES), errors.Is(err, unix.ELOOP):
			return opened, fmt.Errorf("%s.host_path: %s: %w: %w", field, m.GetHostPath(), err, errdefs.ErrInvalidArgument)
		case err != nil:
			return opened, fmt.Errorf("%s.host_path: %s: %w", field, m.GetHostPath(), err)
		}
		opened = append(opened, workerapi.Mount{
			Guest: path.Clean(m.GetContainerPath()), ReadOnly: m.GetReadonly(), Dir: workerapi.File{File: dir},
		})
	}
	slices.SortFunc(opened, func(a, b workerapi.Mount) int { return strings.Compare(b.Guest, a.Guest) })
	return opened, nil
}

// resolveOf returns the openat2 resolve flags for a container's mounts. A kubelet's paths are trusted. A module's paths
// must not contain symbolic links, because the paths were checked by name against the directories that modules can
// mount.
func resolveOf(config *runtimeapi.ContainerConfig) uint64 {
	if isModule(config) {
		return unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
	}
	return 0
}

// serviceAccount is the mount of the token with which a pod calls the Kubernetes API
// (https://kubernetes.io/docs/tasks/run-application/access-api-from-pod).
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// chooseMounts sets which mounts have the values of wasi:config and the objects of wasi:blobstore.
func chooseMounts(o annotations.Options, config *runtimeapi.ContainerConfig, mounts []workerapi.Mount) {
	for i := range mounts {
		m := &mounts[i]
		m.Blobs = m.Guest == o.Blobs
		if o.Config != nil {
			m.Config = slices.Contains(o.Config, m.Guest)
			continue
		}
		m.Config = m.Guest != serviceAccount && hasDataLink(config, m.Guest)
	}
}

// hasDataLink reports whether a mount has the link by which a kubelet replaces the files of a ConfigMap, a Secret, the
// downward API or a projected volume.
func hasDataLink(config *runtimeapi.ContainerConfig, containerPath string) bool {
	return slices.ContainsFunc(config.GetMounts(), func(m *runtimeapi.Mount) bool {
		if path.Clean(m.GetContainerPath()) != containerPath {
			return false
		}
		info, err := os.Lstat(path.Join(m.GetHostPath(), "..data"))
		return err == nil && info.Mode()&os.ModeSymlink != 0
	})
}

func closeMounts(mounts []workerapi.Mount) {
	for _, m := range mounts {
		m.Dir.Close()
	}
}
