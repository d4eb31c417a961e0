package wasm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/pairs"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// storeInterface is the interface without which a component uses no store.
const storeInterface = "wasi:keyvalue/store"

// Pairs bound the store that the node keeps for each namespace. Bytes of 0 means that there are none.
type Pairs = pairs.Limits

// namespaceName matches the names of namespaces (RFC 1123 labels), which name the stores' directories.
var namespaceName = lazyregexp.New(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// storesDir has a directory for each namespace with a store.
func storesDir(root string) string { return filepath.Join(root, "keyvalue") }

// validateStore checks that the node has a store for a pod that uses it.
func (b *Backend) validateStore(o annotations.Options, p *sandbox.Pod) error {
	namespace := p.Config.GetMetadata().GetNamespace()
	switch {
	case o.Store != annotations.StoreOfNode:
		return nil
	case b.cfg.Pairs.Bytes == 0:
		return fmt.Errorf("annotation %s: this node keeps no pairs (wasm.keyvalue_bytes is 0): %w", b.cfg.LabelPrefix+annotations.KeyStore,
			errdefs.ErrInvalidArgument)
	case !namespaceName().MatchString(namespace):
		return fmt.Errorf("annotation %s: the namespace %q is not a DNS label: %w", b.cfg.LabelPrefix+annotations.KeyStore, namespace,
			errdefs.ErrInvalidArgument)
	}
	return nil
}

// openStore sets the store for wasi:keyvalue in the specification of a container that uses it.
func (b *Backend) openStore(o annotations.Options, p *sandbox.Pod, loaded workerapi.Loaded, spec *workerapi.PodSpec) (err error) {
	switch {
	case o.Store == "" || !imports(loaded, storeInterface):
		return nil
	case o.Store != annotations.StoreOfNode:
		spec.KeyValue, err = o.StoreURL(b.cfg.LabelPrefix, spec.Env)
		return err
	}
	if err := b.validateStore(o, p); err != nil {
		return err
	}
	dir, err := b.makeStore(p.Config.GetMetadata().GetNamespace())
	if err != nil {
		return fmt.Errorf("store of the namespace: %w", err)
	}
	spec.NodeStore = &workerapi.NodeStore{Dir: workerapi.File{File: dir}, MaxBytes: b.cfg.Pairs.Bytes, MaxKeys: b.cfg.Pairs.Keys}
	return nil
}

// makeStore opens the directory of a namespace's store, and makes it if it is missing. The files in it are the workers'.
func (b *Backend) makeStore(namespace string) (*os.File, error) {
	dir := filepath.Join(storesDir(b.cfg.Root), namespace)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := pairs.Own(dir, b.cfg.UID, b.cfg.GID); err != nil { // wasm.user may have changed
		return nil, err
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// StoreInfo describes the store of a namespace: the size of its file in bytes, and when a pair was changed last.
type StoreInfo struct {
	Namespace string
	Bytes     int64
	Changed   time.Time
}

// Stores returns the stores with pairs, by namespace. The parameter root is Config.Root.
func Stores(root string) ([]StoreInfo, error) {
	entries, err := os.ReadDir(storesDir(root))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var all []StoreInfo
	for _, e := range entries {
		size, changed, err := pairs.Stat(filepath.Join(storesDir(root), e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, StoreInfo{e.Name(), size, changed})
	}
	return all, nil
}

// RemoveStore removes all pairs of a namespace. Pods that use the store find it empty. It returns errdefs.ErrNotFound if
// the namespace has no pairs. The parameter root is Config.Root.
func RemoveStore(ctx context.Context, root, namespace string) error {
	if !namespaceName().MatchString(namespace) {
		return fmt.Errorf("the namespace %q is not a DNS label: %w", namespace, errdefs.ErrInvalidArgument)
	}
	dir := filepath.Join(storesDir(root), namespace)
	if _, _, err := pairs.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the namespace %q has no pairs on this node: %w", namespace, errdefs.ErrNotFound)
	}
	return pairs.Remove(ctx, dir)
}
