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

// sign makes a certificate; the authority's own while it has none.
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

// get asks the server for a page that is not there, over TLS and over QUIC.
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

// TestFaultW6_ServerCertificate: clients refuse a server of the wrong name and one whose certificate has expired, and
// the server logs it.
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
					t.Errorf("%s: %v", way, err)
				}
			}
			eventually(t, "both are logged", func() bool {
				return strings.Contains(s.log.String(), "QUIC handshake failed") && strings.Contains(s.log.String(), "TLS handshake error")
			})
		})
	}
}

// TestFaultW6_ClientCertificate: where clients must have a certificate, those without one, with an expired one and with
// one of another authority are refused and logged; the right one is served.
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
				return &test.certs[0], nil // even one that the server does not ask for
			}
			before := len(s.log.String())
			for way, err := range s.get(t, c) {
				if err == nil {
					t.Errorf("%s: served", way)
				}
			}
			eventually(t, "both are logged with their cause", func() bool {
				return strings.Count(s.log.String()[before:], test.log) >= 2
			})
		})
	}
	c := s.clientTLS()
	c.Certificates = []tls.Certificate{ca.client(t, time.Now().Add(time.Hour))}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("%s with the right certificate: %v", way, err)
		}
	}
}

// TestFaultW6_Downgrade: TLS 1.1 and HTTP/3 without its ALPN are refused and logged.
func TestFaultW6_Downgrade(t *testing.T) {
	s := startServer(t, &echo{})
	c := s.clientTLS()
	c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if conn, err := tls.Dial("tcp", s.TLSAddress, c); err == nil {
		t.Errorf("TLS %x was spoken", conn.ConnectionState().Version)
		conn.Close()
	}
	eventually(t, "it is logged", func() bool { return strings.Contains(s.log.String(), "unsupported versions") })
	c = s.clientTLS()
	c.NextProtos = []string{"h9"}
	if _, err := tls.Dial("tcp", s.TLSAddress, c); err == nil {
		t.Error("a protocol that is not served was agreed on")
	}
	conn, err := tls.Dial("tcp", s.TLSAddress, s.clientTLS())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if v := conn.ConnectionState().Version; v != tls.VersionTLS13 {
		t.Errorf("the best version in common is %x", v)
	}
}

// TestTLSUpdate: new material counts for new connections, also what it says of clients; bad material changes nothing.
func TestTLSUpdate(t *testing.T) {
	s := startServer(t, &echo{})
	cache := tls.NewLRUClientSessionCache(8)
	c := s.clientTLS()
	c.ClientSessionCache = cache
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Fatalf("%s: %v", way, err)
		}
	}
	if err := s.tls.Update(Material{Certificate: []byte("junk")}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("junk: %v", err)
	}
	fresh, err := SelfSigned([]string{"localhost"}, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	fresh.RequireClient = true
	if err := s.tls.Update(fresh); !errdefs.IsInvalidArgument(err) {
		t.Errorf("clients are required and there are no authorities: %v", err)
	}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("%s after bad updates: %v", way, err)
		}
	}
	ca := newAuthority(t)
	fresh.ClientCAs = ca.pem
	if err := s.tls.Update(fresh); err != nil {
		t.Fatal(err)
	}
	s.roots.AppendCertsFromPEM(fresh.Certificate)
	for way, err := range s.get(t, c) { // with tickets of the time before
		if err == nil {
			t.Errorf("%s: a client without a certificate is served", way)
		}
	}
	c.Certificates = []tls.Certificate{ca.client(t, time.Now().Add(time.Hour))}
	for way, err := range s.get(t, c) {
		if err != nil {
			t.Errorf("%s: %v", way, err)
		}
	}
}
