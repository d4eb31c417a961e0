// Package tlsfile reads the certificates, keys and authorities of TLS from files in PEM. It knows nothing about who uses
// them.
package tlsfile

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
)

// Authorities reads a file of certificate authorities. Its errors are errdefs.ErrFailedPrecondition.
func Authorities(path string) (*x509.CertPool, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("certificate authorities: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("certificate authorities: %s has no certificate in PEM: %w", path, errdefs.ErrFailedPrecondition)
	}
	return pool, nil
}

// Pair names the files of a certificate and its key.
type Pair struct{ Certificate, Key string }

// Read reads the files. Its errors are errdefs.ErrFailedPrecondition.
func (p Pair) Read() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(p.Certificate, p.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %q with key %q: %w: %w", p.Certificate, p.Key, err, errdefs.ErrFailedPrecondition)
	}
	return &pair, nil
}

// Server returns the configuration of a server that reads the files at each handshake, so that renewed ones take effect.
// It fails if they cannot be read now. If clientCA is not empty, clients must show a certificate from one of the
// authorities in this file.
func (p Pair) Server(clientCA string) (*tls.Config, error) {
	if _, err := p.Read(); err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.Read() }}
	if clientCA == "" {
		return config, nil
	}
	var err error
	config.ClientCAs, err = Authorities(clientCA)
	config.ClientAuth = tls.RequireAndVerifyClientCert
	return config, err
}

// Client returns the configuration of a client that believes the authorities in the file ca, or those of the system if ca
// is empty. Unless p is empty, the client shows its certificate, which it reads at each handshake. Client fails if a file
// cannot be read now.
func (p Pair) Client(ca string) (config *tls.Config, err error) {
	config = &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		if config.RootCAs, err = Authorities(ca); err != nil {
			return nil, err
		}
	}
	if p == (Pair{}) {
		return config, nil
	}
	if _, err := p.Read(); err != nil {
		return nil, err
	}
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.Read() }
	return config, nil
}
