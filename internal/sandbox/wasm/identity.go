package wasm

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// The files in a mount that contains a certificate. They are named as in a Secret of type kubernetes.io/tls.
const (
	certFile     = "tls.crt"
	keyFile      = "tls.key"
	clientCAFile = "ca.crt"
	// maxPEM bounds the size of each file, in bytes.
	maxPEM = 1 << 20
)

// identityOf returns the certificate of the pod's server, or nil if TLS is off. The second result is when to renew the
// certificate. It is zero for a certificate from a mount, because the daemon does not renew such certificates.
func (b *Backend) identityOf(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, o annotations.Options,
	component string) (t *workerapi.TLS, renewAt time.Time, err error) {
	switch o.TLS {
	case annotations.TLSOff:
		return nil, renewAt, nil
	case annotations.TLSGenerated:
		t = &workerapi.TLS{}
		t.Certificate, t.Key, renewAt, err = b.tls.Issue(ctx, addresses(p), hostNames(p, component))
		return t, renewAt, err
	default:
		t, err = mountedIdentity(hostPathOf(c.Config.GetMounts(), o.TLS), o.RequireClient)
		if err != nil {
			return nil, renewAt, fmt.Errorf("annotation %s%s: %w", b.cfg.LabelPrefix, annotations.KeyTLS, err)
		}
		return t, renewAt, nil
	}
}

// hostPathOf returns the host path of the mount at the given container path, or "" if there is no such mount.
func hostPathOf(mounts []*runtimeapi.Mount, at string) string {
	for _, m := range mounts {
		if path.Clean(m.GetContainerPath()) == at {
			return m.GetHostPath()
		}
	}
	return ""
}

// mountedIdentity reads a certificate, its key and, if requireClient is set, the authority for client certificates.
func mountedIdentity(dir string, requireClient bool) (*workerapi.TLS, error) {
	t := &workerapi.TLS{RequireClient: requireClient}
	for _, file := range []struct {
		name     string
		into     *[]byte
		required bool
	}{
		{certFile, &t.Certificate, true}, {keyFile, &t.Key, true}, {clientCAFile, &t.ClientCAs, requireClient},
	} {
		raw, err := readBelow(dir, file.name, maxPEM)
		if err != nil && (file.required || !errors.Is(err, fs.ErrNotExist)) {
			return nil, fmt.Errorf("%s in %s: %w: %w", file.name, dir, err, errdefs.ErrInvalidArgument)
		}
		*file.into = raw
	}
	if _, err := tls.X509KeyPair(t.Certificate, t.Key); err != nil {
		return nil, fmt.Errorf("%s and %s in %s: %w: %w", certFile, keyFile, dir, err, errdefs.ErrInvalidArgument)
	}
	if len(t.ClientCAs) > 0 && !x509.NewCertPool().AppendCertsFromPEM(t.ClientCAs) {
		return nil, fmt.Errorf("%s in %s has no certificate: %w", clientCAFile, dir, errdefs.ErrInvalidArgument)
	}
	if !requireClient {
		t.ClientCAs = nil // a Secret's ca.crt is usually the authority for the server's certificate, not for the clients'
	}
	return t, nil
}

// addresses returns the addresses that clients can use to reach the pod. If the pod is on the host network, the
// addresses include the node's.
func addresses(p *sandbox.Pod) []netip.Addr {
	ips := append([]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}, p.IPs...)
	if p.Netns != "" {
		return ips
	}
	own, _ := net.InterfaceAddrs()
	for _, addr := range own {
		if prefix, err := netip.ParsePrefix(addr.String()); err == nil && !slices.Contains(ips, prefix.Addr().Unmap()) {
			ips = append(ips, prefix.Addr().Unmap())
		}
	}
	return ips
}

var dnsName = lazyregexp.New(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// hostNames returns the host names that clients can use to reach the pod.
func hostNames(p *sandbox.Pod, component string) []string {
	m := p.Config.GetMetadata()
	domain, rest, _ := strings.Cut(component, ":")
	server, _, _ := strings.Cut(rest, "@")
	candidates := []string{m.GetName(), p.Config.GetHostname(), m.GetName() + "." + m.GetNamespace(), strings.ToLower(server), domain,
		"localhost"}
	var names []string
	for _, name := range candidates {
		if len(name) <= 253 && dnsName().MatchString(name) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// renew replaces the certificate of a running pod.
func (b *Backend) renew(ctx context.Context, h *handle) error {
	s, l := h.Snapshot()
	if l == nil {
		return nil
	}
	o, err := b.optionsOf(l.pod, l.container)
	if err != nil {
		return err
	}
	t, renewAt, err := b.identityOf(ctx, l.pod, l.container, o, s.Component)
	if err != nil || t == nil {
		return err
	}
	if err := l.worker.Conn().UpdateTLS(ctx, h.ID, *t); err != nil {
		return err
	}
	_, err = h.Update(l, func(s *state) { s.RenewAt = renewAt })
	return err
}

// readBelow reads a regular file of at most limit bytes in an untrusted directory. It follows symbolic links, because a
// Secret's files are links to the current version, but it resolves the links as if dir were the root directory, so that
// no link leads out of dir.
func readBelow(dir, name string, limit int64) ([]byte, error) {
	f, err := openBelow(dir, name, limit)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// openBelow opens a file for readBelow.
func openBelow(dir, name string, limit int64) (*os.File, error) {
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(at)
	fd, err := unix.Openat2(at, name, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() > limit) {
		err = fmt.Errorf("%s is not a regular file of at most %d bytes", name, limit)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// followCertificate watches the certificate of a container if the certificate is from a mount.
func (b *Backend) followCertificate(id string, l *life) {
	o, err := b.optionsOf(l.pod, l.container)
	if err != nil || o.TLS == annotations.TLSGenerated || o.TLS == annotations.TLSOff {
		return
	}
	b.watcher.Follow(id, hostPathOf(l.container.Config.GetMounts(), o.TLS))
}

// certificateChanged replaces the certificate of a running container with the one in its mount. If the new certificate
// is invalid, the previous one stays in use.
func (b *Backend) certificateChanged(id string) {
	h := b.ledger.Loaded(id)
	if h == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.renew(ctx, h); err != nil {
		b.log.Error("replace certificate failed; the previous one stays in use", "container", id, "err", err)
		return
	}
	b.log.Info("certificate replaced", "container", id)
}
