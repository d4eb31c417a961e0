package tap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/atomicfile"
)

const recordVersion = 1

// record is the state of the namespace before Wire: enough to complete Wire, to undo it, and to configure the guest.
type record struct {
	Version int `json:"version"`
	// Netns identifies the namespace.
	Netns identity `json:"netns"`
	Links []wiring `json:"links"`
}

// wiring is one interface with the state that Unwire restores.
type wiring struct {
	Interface
	// LinkAddrs are the addresses as configured on the link.
	LinkAddrs []netip.Prefix `json:"had"`
	// DisableIPv6 is the link's sysctl disable_ipv6; empty on a node without IPv6.
	DisableIPv6 string `json:"disableIPv6"`
}

// identity distinguishes a network namespace from all others that ever existed on this node.
type identity struct {
	// Boot is the kernel's boot ID.
	Boot string `json:"boot"`
	// Cookie is SO_NETNS_COOKIE, which is unique within a boot. It is 0 on kernels before 5.14.
	Cookie uint64 `json:"cookie"`
}

// identify returns the identity of the calling thread's namespace.
func identify() (identity, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return identity{}, err
	}
	id := identity{Boot: strings.TrimSpace(string(boot))}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return identity{}, err
	}
	defer unix.Close(fd)
	id.Cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = nil
	}
	return id, err
}

func (r *record) interfaces() []Interface {
	all := make([]Interface, 0, len(r.Links))
	for _, w := range r.Links {
		i := w.Interface
		i.Addrs, i.Routes = slices.Clone(i.Addrs), slices.Clone(i.Routes)
		all = append(all, i)
	}
	return all
}

// Read returns the interfaces that Wire returned. It returns ErrNotFound if there is no record, that is, if nothing is
// wired, and ErrDataLoss if the record is damaged.
func Read(path string) ([]Interface, error) {
	r, err := readRecord(path)
	if err != nil {
		return nil, err
	}
	return r.interfaces(), nil
}

func readRecord(path string) (*record, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("record %s of a guest's network: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of a guest's network: %w", err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("record %s of a guest's network: %v: %w", path, err, errdefs.ErrDataLoss)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("record %s of a guest's network has version %d, but this program supports %d; was it downgraded?: %w",
			path, r.Version, recordVersion, errdefs.ErrFailedPrecondition)
	}
	return &r, nil
}

// write replaces the record atomically. It does not sync, because the namespace does not survive a power loss either.
func (r *record) write(path string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	err = atomicfile.Replace(path, data, 0o600)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	if err != nil {
		return fmt.Errorf("write the record of a guest's network: %w", err)
	}
	return nil
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of a guest's network: %w", err)
	}
	return nil
}
