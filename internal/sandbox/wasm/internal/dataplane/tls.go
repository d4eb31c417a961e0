package dataplane

import (
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

// Material is what a server proves itself with and whom it believes, all in PEM.
type Material struct {
	// Certificate is the chain, leaf first.
	Certificate []byte `json:"certificate"`
	Key         []byte `json:"key"`
	// ClientCAs are the authorities of client certificates; a client that shows a certificate of another is refused.
	ClientCAs []byte `json:"clientCAs,omitempty"`
	// RequireClient refuses clients without a certificate; it needs ClientCAs.
	RequireClient bool `json:"requireClient,omitempty"`
}

// TLS holds a Server's TLS configuration, TLS 1.3 for QUIC and 1.2 at least for TCP. The material can be replaced while
// connections are open; those keep what they were made with.
type TLS struct {
	current atomic.Pointer[tls.Config]
}

// NewTLS reads m; errdefs.ErrInvalidArgument says which part is wrong.
func NewTLS(m Material) (*TLS, error) {
	t := &TLS{}
	if err := t.Update(m); err != nil {
		return nil, err
	}
	return t, nil
}

// Update replaces the material for connections made from now on; after an error the old one stays.
func (t *TLS) Update(m Material) error {
	c, err := m.config()
	if err != nil {
		return err
	}
	t.current.Store(c)
	return nil
}

// config is what listeners are made with: it leads each handshake to the material of the moment.
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
		MinVersion:   tls.VersionTLS12, // its cipher suites in Go are AEAD with ECDHE first, RSA key exchange is off
	}
	if len(m.ClientCAs) > 0 {
		c.ClientCAs = x509.NewCertPool()
		if !c.ClientCAs.AppendCertsFromPEM(m.ClientCAs) {
			return nil, fmt.Errorf("TLS client CAs: no certificate in PEM found: %w", errdefs.ErrInvalidArgument)
		}
		c.ClientAuth = tls.VerifyClientCertIfGiven
		// A session ticket would carry the judgement of the authorities of its day past an Update.
		c.SessionTicketsDisabled = true
	}
	if m.RequireClient {
		if c.ClientCAs == nil {
			return nil, fmt.Errorf("TLS: client certificates are required, but there are no client CAs: %w",
				errdefs.ErrInvalidArgument)
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return c, nil
}

// SelfSigned makes a certificate, valid for ten years, of a fresh P-256 key for the given names and addresses.
func SelfSigned(names []string, addresses []netip.Addr) (Material, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Material{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return Material{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{"Tripod (generated)"}},
		// An hour back for clients whose clocks are behind.
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
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return Material{}, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Material{}, err
	}
	return Material{
		Certificate: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:         pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
	}, nil
}
