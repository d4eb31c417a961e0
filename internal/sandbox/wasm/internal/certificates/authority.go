// Package certificates issues the certificates of pods that have none in a mount, and reports when those in mounts change.
package certificates

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// Life is how long a certificate of an Authority is valid. It is to be renewed after two thirds of that.
const Life = 30 * 24 * time.Hour

const (
	// authorityLife is how long the node's authority is valid.
	authorityLife = 10 * 365 * 24 * time.Hour
	// backdated is how far in the past NotBefore lies, for clients whose clocks are slow.
	backdated = time.Hour
)

// Authority is the node's certificate authority for pods without a certificate in a mount. Its files are ca.crt
// and ca.key. The authority is created on first use.
type Authority struct {
	dir string

	mu   sync.Mutex
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
}

// NewAuthority returns the authority whose files are in dir.
func NewAuthority(dir string) *Authority { return &Authority{dir: dir} }

// CertFile returns the path of the authority's certificate.
func (a *Authority) CertFile() string { return filepath.Join(a.dir, "ca.crt") }
func (a *Authority) keyFile() string  { return filepath.Join(a.dir, "ca.key") }

// Issue returns a new certificate chain for the given addresses and names, and the certificate's key, both in PEM. The
// third result is when to renew the certificate.
func (a *Authority) Issue(ctx context.Context, ips []netip.Addr, names []string) (chain, key []byte, renewAt time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ready(ctx); err != nil {
		return nil, nil, renewAt, fmt.Errorf("the node's certificate authority: %w", err)
	}
	now := time.Now()
	end := now.Add(Life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: names[0]}, DNSNames: names, NotBefore: now.Add(-backdated), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, ip := range ips {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.Unmap().AsSlice()))
	}
	leaf, key, err := dataplane.IssueCertificate(template, a.cert, a.key)
	if err != nil {
		return nil, nil, renewAt, err
	}
	return append(leaf, a.pem...), key, now.Add(end.Sub(now) * 2 / 3), nil
}

// ready reads the authority, unless it is already loaded. It creates a new authority if a file is missing or the
// Authority expires within Life.
func (a *Authority) ready(ctx context.Context) error {
	if a.cert != nil && time.Until(a.cert.NotAfter) > Life {
		return nil
	}
	err := a.read()
	if err == nil && time.Until(a.cert.NotAfter) > Life {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return a.create(ctx)
}

func (a *Authority) read() error {
	cert, err := os.ReadFile(a.CertFile())
	if err != nil {
		return err
	}
	key, err := os.ReadFile(a.keyFile())
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("%s and %s are not a key pair (%w); remove both files to create a new authority: %w", a.CertFile(), a.keyFile(), err,
			errdefs.ErrFailedPrecondition)
	}
	signer, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA {
		return fmt.Errorf("%s is not a certificate authority with an ECDSA key: %w", a.CertFile(), errdefs.ErrFailedPrecondition)
	}
	a.cert, a.pem, a.key = pair.Leaf, cert, signer
	return nil
}

var fpAuthority = failpoint.New("wasm.tls.key")

// create makes a new authority. It writes the certificate last, because the authority is complete once its certificate
// exists.
func (a *Authority) create(ctx context.Context) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "Tripod node " + host}, NotBefore: now.Add(-backdated), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	cert, key, err := dataplane.IssueCertificate(template, nil, nil)
	if err != nil {
		return err
	}
	if err := ledger.RemoveFile(a.CertFile()); err != nil { // so that an old certificate is never used with the new key
		return err
	}
	// The files are synced, because clients trust the authority for years.
	if err := atomicfile.Write(a.keyFile(), key, 0o600); err != nil {
		return sandbox.DiskError(err)
	}
	if err := fpAuthority.Hit(ctx); err != nil {
		return err
	}
	if err := atomicfile.Write(a.CertFile(), cert, 0o644); err != nil {
		return sandbox.DiskError(err)
	}
	return a.read()
}
