package wasm

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

const (
	// authorityLife is how long the node's authority is valid. leafLife is how long the certificates that the authority
	// issues are valid. Certificates are renewed after two thirds of leafLife.
	authorityLife = 10 * 365 * 24 * time.Hour
	leafLife      = 30 * 24 * time.Hour
	// backdated is how far in the past NotBefore lies, for clients whose clocks are slow.
	backdated = time.Hour
)

// authority is the node's certificate authority for pods without a certificate in a mount. Its files are <Root>/ca.crt
// and ca.key. The authority is created on first use.
type authority struct {
	dir string

	mu   sync.Mutex
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
}

func newAuthority(dir string) *authority { return &authority{dir: dir} }

func (a *authority) certFile() string { return filepath.Join(a.dir, "ca.crt") }
func (a *authority) keyFile() string  { return filepath.Join(a.dir, "ca.key") }

// issue returns a new certificate chain for the given addresses and names, and the certificate's key, both in PEM. The
// third result is when to renew the certificate.
func (a *authority) issue(ctx context.Context, ips []netip.Addr, names []string) (chain, key []byte, renewAt time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ready(ctx); err != nil {
		return nil, nil, renewAt, fmt.Errorf("the node's certificate authority: %w", err)
	}
	now := time.Now()
	end := now.Add(leafLife)
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
// authority expires within leafLife.
func (a *authority) ready(ctx context.Context) error {
	if a.cert != nil && time.Until(a.cert.NotAfter) > leafLife {
		return nil
	}
	err := a.read()
	if err == nil && time.Until(a.cert.NotAfter) > leafLife {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return a.create(ctx)
}

func (a *authority) read() error {
	cert, err := os.ReadFile(a.certFile())
	if err != nil {
		return err
	}
	key, err := os.ReadFile(a.keyFile())
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("%s and %s are not a key pair (%w); remove both files to create a new authority: %w", a.certFile(), a.keyFile(), err, errdefs.ErrFailedPrecondition)
	}
	signer, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA {
		return fmt.Errorf("%s is not a certificate authority with an ECDSA key: %w", a.certFile(), errdefs.ErrFailedPrecondition)
	}
	a.cert, a.pem, a.key = pair.Leaf, cert, signer
	return nil
}

var fpAuthority = failpoint.New("wasm.tls.key")

// create makes a new authority. It writes the certificate last, because the authority is complete once its certificate
// exists.
func (a *authority) create(ctx context.Context) error {
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
	if err := ledger.RemoveFile(a.certFile()); err != nil { // so that an old certificate is never used with the new key
		return err
	}
	// The files are synced, because clients trust the authority for years.
	if err := atomicfile.Write(a.keyFile(), key, 0o600); err != nil {
		return sandbox.DiskError(err)
	}
	if err := fpAuthority.Hit(ctx); err != nil {
		return err
	}
	if err := atomicfile.Write(a.certFile(), cert, 0o644); err != nil {
		return sandbox.DiskError(err)
	}
	return a.read()
}
