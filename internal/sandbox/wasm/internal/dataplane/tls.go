package dataplane

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

// Material holds a server's certificate and key, and the authorities for client certificates, in PEM.
type Material struct {
	// Certificate is the chain, leaf first.
	Certificate []byte `json:"certificate"`
	Key         []byte `json:"key"`
	// ClientCAs are the authorities for client certificates. A client with a certificate from another authority is
	// refused.
	ClientCAs []byte `json:"clientCAs,omitempty"`
	// RequireClient refuses clients without a certificate. It requires ClientCAs.
	RequireClient bool `json:"requireClient,omitempty"`
}

// TLS holds a Server's TLS configuration: TLS 1.3 for QUIC, and at least TLS 1.2 for TCP. The material can be replaced
// at any time; open connections keep the old material.
type TLS struct {
	current atomic.Pointer[tls.Config]
}

// NewTLS parses the material. It returns errdefs.ErrInvalidArgument if the material is invalid.
func NewTLS(m Material) (*TLS, error) {
	t := &TLS{}
	if err := t.Update(m); err != nil {
		return nil, err
	}
	return t, nil
}

// Update replaces the material for new connections. If the new material is invalid, the old material stays.
func (t *TLS) Update(m Material) error {
	c, err := m.config()
	if err != nil {
		return err
	}
	t.current.Store(c)
	return nil
}

// config returns the configuration for a listener. Each handshake uses the material that is current at that time.
func (t *TLS) config(protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := t.current.Load().Clone()
			c.NextProtos = protocols
			return c, nil
		},
	}
}

func (m Material) config() (*tls.Config, error) {
	pair, err := tls.X509KeyPair(m.Certificate, m.Key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate and key: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	c := &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12, // by default, Go prefers AEAD with ECDHE and excludes RSA key exchange
	}
	if len(m.ClientCAs) > 0 {
		c.ClientCAs = x509.NewCertPool()
		if !c.ClientCAs.AppendCertsFromPEM(m.ClientCAs) {
			return nil, fmt.Errorf("TLS client CAs: no PEM certificate found: %w", errdefs.ErrInvalidArgument)
		}
		c.ClientAuth = tls.VerifyClientCertIfGiven
		// With tickets, a client could resume a session after an Update without being verified again.
		c.SessionTicketsDisabled = true
	}
	if m.RequireClient {
		if c.ClientCAs == nil {
			return nil, fmt.Errorf("TLS: client certificates are required, but no client CAs are set: %w",
				errdefs.ErrInvalidArgument)
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return c, nil
}

// SelfSigned returns a new P-256 key and a self-signed certificate for the given names and addresses, valid for ten
// years.
func SelfSigned(names []string, addresses []netip.Addr) (m Material, err error) {
	template := &x509.Certificate{
		Subject: pkix.Name{Organization: []string{"Tripod (generated)"}},
		// One hour in the past, for clients whose clocks are slow.
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(10, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              names,
	}
	for _, a := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(a.AsSlice()))
	}
	m.Certificate, m.Key, err = IssueCertificate(template, nil, nil)
	return m, err
}

// IssueCertificate generates a P-256 key and issues a certificate for that key from the template, with a random serial
// number. It returns both in PEM. If parent is nil, the certificate is self-signed; otherwise signer must be the
// parent's key.
func IssueCertificate(template, parent *x509.Certificate, signer crypto.Signer) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)) // RFC 5280, 4.1.2.2: at most 20 octets
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber = serial.Add(serial, big.NewInt(1)) // positive
	if parent == nil {
		parent, signer = template, private
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, private.Public(), signer)
	if err != nil {
		return nil, nil, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
		nil
}
