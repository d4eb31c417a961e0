package dataplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/quic-go/quic-go/http3"
)

// authority signs certificates for tests.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{}
	_, a.pem, a.key = a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	block, _ := pem.Decode(a.pem)
	var err error
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		t.Fatal(err)
	}
	return a
}

// sign makes a certificate. The first one is self-signed and becomes the authority's own.
func (a *authority) sign(t testing.TB, c *x509.Certificate) (tls.Certificate, []byte, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(time.Now().UnixNano())
	if c.NotBefore.IsZero() {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key
}

func (a *authority) client(t testing.TB, notAfter time.Time) tls.Certificate {
	cert, _, _ := a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "client"}, NotBefore: notAfter.Add(-time.Hour), NotAfter: notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return cert
}

func (a *authority) server(t testing.TB, name string, notAfter time.Time) Material {
	_, cert, key := a.sign(t, &x509.Certificate{
		DNSNames: []string{name}, NotBefore: notAfter.Add(-time.Hour), NotAfter: notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return Material{Certificate: cert, Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})}
}

// get requests an unknown path over TLS and over QUIC, and returns the error of each, or nil for the expected 404.
func (s *testServer) get(t testing.TB, c *tls.Config) map[string]error {
	t.Helper()
	h3, h2 := &http3.Transport{TLSClientConfig: c.Clone()}, overHTTP2(c.Clone())
	defer h3.Close()
	defer h2.CloseIdleConnections()
	errs := map[string]error{}
	for address, transport := range map[string]http.RoundTripper{s.TLSAddress: h2, s.QUICAddress: h3} {
		response, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Get("https://" + address + "/none")
		if err == nil {
			response.Body.Close()
			if response.StatusCode != http.StatusNotFound {
				err = errors.New(response.Status)
			}
		}
		errs[transportName(transport)] = err
	}
	return errs
}

func transportName(r http.RoundTripper) string {
	if _, ok := r.(*http3.Transport); ok {
		return "h3"
	}
	return "h2"
}

// TestFaultW6_ServerCertificate checks that clients refuse a certificate with a wrong name and an expired one, and that
// the server logs the failed handshakes.
func TestFaultW6_ServerCertificate(t *testing.T) {
	ca := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	for name, test := range map[string]struct {
		material Material
		want     string
	}{
		"wrong name": {ca.server(t, "other.example", time.Now().Add(time.Hour)), "other.example"},
		"expired":    {ca.server(t, "localhost", time.Now().Add(-time.Minute)), "expired"},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, &echo{}, func(_ *GRPCOptions, _ *Config, m *Material) { *m = test.material })
			for way, err := range s.get(t, &tls.Config{RootCAs: roots, ServerName: "localhost"}) {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("GET over %s = %v, want an error with %q", way, err, test.want)
				}
			}
			eventually(t, "both failed handshakes are logged", func() bool {
				return strings.Contains(s.log.String(), "QUIC handshake failed") && strings.Contains(s.log.String(), "TLS handshake failed")
			})
		})
	}
}

// TestFaultW6_ClientCertificate checks with RequireClient that clients without a certificate, with an expired one or
// with one from another authority are refused and logged, and that a client with a valid certificate is served.
func TestFaultW6_ClientCertificate(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	s := startServer(t, &echo{}, func(_ *GRPCOptions, _ *Config, m *Material) {
		m.ClientCAs, m.RequireClient = ca.pem, true
	})
	for name, test := range map[string]struct {
		certs []tls.Certificate
		log   string
	}{
		"none":            {nil, "client didn't provide a certificate"},
		"expired":         {[]tls.Certificate{ca.client(t, time.Now().Add(-time.Minute))}, "expired"},
		"other authority": {[]tls.Certificate{other.client(t, time.Now().Add(time.Hour))}, "unknown authority"},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.clientTLS()
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				if len(test.certs) == 0 {
					return &tls.Certificate{}, nil
				}
				return &test.certs[0], nil // even if the server does not accept its authority
			}
			before := len(s.log.String())
			for way, err := range s.get(t, c) {
				if err == nil {
					t.Errorf("GET over %s = nil, want a refused handshake", way)
				}
			}
			eventually(t, "both refused handshakes are logged with their cause", func() bool {
				return strings.Count(s.log.String()[before:], test.log) >= 2
			})
		})
	}
	c := s.clientTLS()
	c.Certificates = []tls.Certificate{ca.client(t, time.Now().Add(time.Hour))}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("GET over %s with a valid certificate = %v", way, err)
		}
	}
}

// TestFaultW6_Downgrade checks that TLS 1.1 and unknown ALPN protocols are refused.
func TestFaultW6_Downgrade(t *testing.T) {
	s := startServer(t, &echo{})
	c := s.clientTLS()
	c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if conn, err := tls.Dial("tcp", s.TLSAddress, c); err == nil {
		t.Errorf("negotiated TLS version = %x, want a refused handshake", conn.ConnectionState().Version)
		conn.Close()
	}
	eventually(t, "the refused handshake is logged", func() bool { return strings.Contains(s.log.String(), "unsupported versions") })
	c = s.clientTLS()
	c.NextProtos = []string{"h9"}
	if _, err := tls.Dial("tcp", s.TLSAddress, c); err == nil {
		t.Error("Dial with the ALPN protocol h9 = nil, want an error")
	}
	conn, err := tls.Dial("tcp", s.TLSAddress, s.clientTLS())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if v := conn.ConnectionState().Version; v != tls.VersionTLS13 {
		t.Errorf("negotiated TLS version = %x, want TLS 1.3", v)
	}
}

// TestTLSUpdate checks that Update applies to new connections, including client authentication, and that invalid
// material changes nothing.
func TestTLSUpdate(t *testing.T) {
	s := startServer(t, &echo{})
	cache := tls.NewLRUClientSessionCache(8)
	c := s.clientTLS()
	c.ClientSessionCache = cache
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Fatalf("GET over %s = %v", way, err)
		}
	}
	if err := s.tls.Update(Material{Certificate: []byte("junk")}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Update with an invalid certificate = %v, want ErrInvalidArgument", err)
	}
	fresh, err := SelfSigned([]string{"localhost"}, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	fresh.RequireClient = true
	if err := s.tls.Update(fresh); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Update with RequireClient but no ClientCAs = %v, want ErrInvalidArgument", err)
	}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("GET over %s after invalid updates = %v", way, err)
		}
	}
	ca := newAuthority(t)
	fresh.ClientCAs = ca.pem
	if err := s.tls.Update(fresh); err != nil {
		t.Fatal(err)
	}
	s.roots.AppendCertsFromPEM(fresh.Certificate)
	for way, err := range s.get(t, c) { // with session tickets from before the update
		if err == nil {
			t.Errorf("GET over %s without a client certificate = nil, want an error", way)
		}
	}
	c.Certificates = []tls.Certificate{ca.client(t, time.Now().Add(time.Hour))}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("GET over %s with a client certificate = %v", way, err)
		}
	}
}
