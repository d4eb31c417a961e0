package wasm

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// nodeRoots are where distributions keep the authorities that they trust: Debian and Alpine, Fedora, openSUSE.
var nodeRoots = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"}

// rulesOf returns the egress rules of a container. Pods may call out unless an annotation says otherwise, because that is
// what Kubernetes promises, and NetworkPolicies apply. Modules of the edge front door may not unless an annotation
// allows it.
func rulesOf(o annotations.Options, c *runtimeapi.ContainerConfig) string {
	if isModule(c) {
		return cmp.Or(o.Egress, egress.None)
	}
	return cmp.Or(o.Egress, egress.Any)
}

// egressInterfaces are the interfaces that can open connections or send queries.
var egressInterfaces = []string{"tripod:grpc/client", "wasi:http/outgoing-handler", "wasi:sockets/tcp-create-socket",
	"wasi:sockets/udp-create-socket", "wasi:sockets/ip-name-lookup"}

// imports reports whether a component imports one of the given interfaces, whose names have no versions.
func imports(loaded workerapi.Loaded, ifaces ...string) bool {
	return slices.ContainsFunc(loaded.Imports, func(name string) bool {
		iface, _, _ := strings.Cut(name, "@")
		return slices.Contains(ifaces, iface)
	})
}

// openEgress opens a pod's egress, and returns the name of its dialer. The name is "" if the component does not import
// one, or if its rules allow nothing.
func (b *Backend) openEgress(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, loaded workerapi.Loaded,
	spec *workerapi.PodSpec) (dialer string, err error) {
	o, err := b.optionsOf(p, c)
	if err != nil || !imports(loaded, egressInterfaces...) && spec.KeyValue == "" {
		return "", err
	}
	rules, err := egress.ParseRules(rulesOf(o, c.Config))
	if err != nil || rules.Empty() {
		return "", err
	}
	spec.Egress = &workerapi.Egress{}
	if spec.Egress.Roots.File, err = openRoots(o, c.Config.GetMounts()); err != nil {
		return "", fmt.Errorf("annotation %s%s: %w: %w", b.cfg.LabelPrefix, annotations.KeyEgressCA, err, errdefs.ErrInvalidArgument)
	}
	spec.Egress.Dialer.File, dialer, err = b.openDialer(ctx, p, c, o)
	return dialer, err
}

// openDialer connects a pod to the node's dialer.
func (b *Backend) openDialer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, o annotations.Options) (*os.File, string, error) {
	netns, err := openNetns(p.Netns)
	if err != nil {
		return nil, "", err
	}
	defer netns.Close()
	d, notice, err := p.DNS()
	if err != nil {
		return nil, "", err
	}
	if notice != "" {
		b.log.Warn(notice, "pod", p.ID)
	}
	dns := egress.DNS{Servers: d.GetServers(), Searches: d.GetSearches(), Options: d.GetOptions()}
	return b.dialers.Open(ctx, egress.Order{Pod: p.ID, Rules: rulesOf(o, c.Config), DNS: dns}, netns)
}

// openNetns opens a pod's network namespace, or the node's if the path is "".
func openNetns(at string) (*os.File, error) {
	fd, err := netthread.Home()
	if at != "" && err == nil {
		_ = os.NewFile(uintptr(fd), "").Close()
		fd, err = netthread.Open(at)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), at), nil
}

// mountOf returns the mount that a file in a container is in, or nil.
func mountOf(mounts []*runtimeapi.Mount, file string) (found *runtimeapi.Mount) {
	for _, m := range mounts {
		at := path.Clean(m.GetContainerPath())
		if strings.HasPrefix(file, strings.TrimSuffix(at, "/")+"/") && (found == nil || len(at) > len(path.Clean(found.GetContainerPath()))) {
			found = m
		}
	}
	return found
}

// openRoots opens the file with the authorities that guests trust: the one that the pod names, or the node's. It returns
// nil if the node has none; then guests trust no server.
func openRoots(o annotations.Options, mounts []*runtimeapi.Mount) (*os.File, error) {
	if o.EgressCA == "" {
		for _, name := range nodeRoots {
			file, err := os.Open(name)
			if err == nil || !errors.Is(err, fs.ErrNotExist) {
				return file, err
			}
		}
		return nil, nil
	}
	m := mountOf(mounts, o.EgressCA)
	if m == nil {
		return nil, fmt.Errorf("the container has no mount with the file %q", o.EgressCA)
	}
	name := strings.TrimPrefix(o.EgressCA, strings.TrimSuffix(path.Clean(m.GetContainerPath()), "/")+"/")
	text, err := readBelow(m.GetHostPath(), name, maxPEM)
	if err != nil {
		return nil, err
	}
	if !x509.NewCertPool().AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate", o.EgressCA)
	}
	return openBelow(m.GetHostPath(), name, maxPEM)
}

// usesDialer reports whether a running container is connected to a dialer.
func (b *Backend) usesDialer(name string) bool {
	return slices.ContainsFunc(b.ledger.All(), func(h *handle) bool {
		s, l := h.Snapshot()
		return l != nil && s.Phase == ledger.Started && s.Dialer == name
	})
}

// followDialers connects the pods whose dialer has ended to another one each time that b.dialerLost says so, until ctx
// ends.
func (b *Backend) followDialers(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.dialerLost:
		}
		b.reconnectAll(ctx)
	}
}

// reconnectSoon makes followDialers look for pods whose dialer has ended.
func (b *Backend) reconnectSoon() {
	select {
	case b.dialerLost <- struct{}{}:
	default: // it will look anyway
	}
}

// reconnectAll connects the running pods whose dialer has ended to another one. Upkeep repeats what fails.
func (b *Backend) reconnectAll(ctx context.Context) {
	for _, h := range b.ledger.All() {
		s, l := h.Snapshot()
		if l == nil || l.worker == nil || s.Phase != ledger.Started || s.Dialer == "" || b.dialers.Alive(s.Dialer) {
			continue
		}
		if err := b.reconnect(ctx, h, l); err != nil && ctx.Err() == nil {
			b.log.Error("the pod cannot call out: connect it to a new dialer failed", "pod", l.pod.ID, "err", err)
		}
	}
}

// reconnect connects a running pod to another dialer.
func (b *Backend) reconnect(ctx context.Context, h *handle, l *life) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	o, err := b.optionsOf(l.pod, l.container)
	if err != nil {
		return err
	}
	conn, name, err := b.openDialer(ctx, l.pod, l.container, o)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := l.worker.Conn().UpdateDialer(ctx, h.ID, conn); err != nil {
		return err
	}
	_, err = h.Update(l, func(s *state) { s.Dialer = name })
	return err
}
