package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/network"
)

// Network is a pod network for tests that cannot create namespaces: each attachment is a file in Dir. The pod's
// annotations fake.tripod.dev/network-setup and network-teardown make the network misbehave.
type Network struct {
	Dir  string
	next atomic.Uint32
	ours sync.Map // the IDs of this process's attachments, which GC leaves alone
}

// Setup writes the attachment's file and assigns an address in 192.0.2.0/24.
func (n *Network) Setup(ctx context.Context, a network.Attachment) (*network.Result, error) {
	if err := n.step(ctx, a, "network-setup"); err != nil {
		return nil, err
	}
	n.ours.Store(a.ID, true)
	if err := os.WriteFile(filepath.Join(n.Dir, a.ID), nil, 0o600); err != nil {
		return nil, err
	}
	ip := netip.AddrFrom4([4]byte{192, 0, 2, byte(n.next.Add(1))})
	return &network.Result{Netns: filepath.Join(n.Dir, a.ID), IPs: []netip.Addr{ip}}, n.step(ctx, a, "network-setup.done")
}

// Teardown removes the attachment's file.
func (n *Network) Teardown(ctx context.Context, a network.Attachment) error {
	if err := n.step(ctx, a, "network-teardown"); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(n.Dir, a.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (n *Network) step(ctx context.Context, a network.Attachment, step string) error {
	return failpoint.Do(ctx, "fake."+step, a.Annotations[annotationPrefix+step])
}

// Present reports whether the attachment's file exists.
func (n *Network) Present(id string) bool {
	_, err := os.Stat(filepath.Join(n.Dir, id))
	return err == nil
}

// Leases lists the attachments, for leak checks.
func (n *Network) Leases() ([]string, error) {
	entries, err := os.ReadDir(n.Dir)
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, err
}

// GC removes the attachments of earlier processes, except those to keep.
func (n *Network) GC(_ context.Context, keep []string) error {
	ids, err := n.Leases()
	for _, id := range ids {
		if _, ours := n.ours.Load(id); !ours && !slices.Contains(keep, id) {
			err = errors.Join(err, os.Remove(filepath.Join(n.Dir, id)))
		}
	}
	return err
}

// Status returns nil: the network is always ready.
func (*Network) Status(context.Context) error { return nil }

// Dial returns errdefs.ErrUnavailable.
func (*Network) Dial(context.Context, string, string, string) (net.Conn, error) {
	return nil, fmt.Errorf("the fake network connects nothing: %w", errdefs.ErrUnavailable)
}

// Stats returns no interfaces.
func (*Network) Stats(string) ([]network.InterfaceStats, error) { return nil, nil }

// CNIResult returns an empty result.
func (*Network) CNIResult(string) (json.RawMessage, error) {
	return json.RawMessage(`{"cniVersion":"1.0.0"}`), nil
}

// UpdatePodCIDR accepts any valid CIDR.
func (*Network) UpdatePodCIDR(cidr string) error {
	if _, err := netip.ParsePrefix(cidr); err != nil {
		return fmt.Errorf("pod CIDR %q: %w: %w", cidr, err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Images is an image store that has every image except those whose names contain "missing". An image whose name contains
// "component" has a component.
type Images struct{}

// Get returns the image with the given name. The image's ID is the digest of that name.
func (Images) Get(_ context.Context, ref string) (image.Image, error) {
	if ref == "" || strings.Contains(ref, "missing") {
		return image.Image{}, fmt.Errorf("image %q: %w", ref, errdefs.ErrNotFound)
	}
	img := image.Image{ID: digest.FromString(ref).String()}
	if strings.Contains(ref, "component") {
		img.Component = &image.Component{Layout: image.LayoutCNCF}
	}
	return img, nil
}
