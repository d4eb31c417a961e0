package requests

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// servedCertificate returns the leaf certificate that a server with the identity presents now.
func servedCertificate(t *testing.T, identity *dataplane.TLS) string {
	t.Helper()
	server, err := dataplane.NewServer(dataplane.Config{Handler: http.NotFoundHandler(), TLS: identity})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(dataplane.Sockets{TLS: ln}); err != nil {
		t.Fatal(err)
	}
	conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return string(conn.ConnectionState().PeerCertificates[0].Raw)
}

// TestRouteCertificate checks that the router presents the configured certificate, and a new one after its files have
// changed, but ignores a certificate that does not match its key.
func TestRouteCertificate(t *testing.T) {
	dir := t.TempDir()
	c := ServeConfig{
		Address: "127.0.0.1:0", Certificate: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"),
		Logger: slog.New(slog.DiscardHandler),
	}
	if _, _, err := serverTLS(c); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("serverTLS with missing files = %v, want ErrNotExist", err)
	}
	write := func(certificate, key []byte) {
		if err := errors.Join(os.WriteFile(c.Certificate, certificate, 0o600), os.WriteFile(c.Key, key, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	generate := func() dataplane.Material {
		m, err := generatedMaterial(c.Address)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	first, second := generate(), generate()
	write(first.Certificate, first.Key)
	identity, _, err := serverTLS(c)
	if err != nil {
		t.Fatal(err)
	}
	before := servedCertificate(t, identity)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { followMaterial(ctx, c, identity, first, time.Millisecond) })
	write(second.Certificate, first.Key)
	if servedCertificate(t, identity) != before {
		t.Error("the router presents a certificate without its key")
	}
	write(second.Certificate, second.Key)
	for deadline := time.Now().Add(10 * time.Second); servedCertificate(t, identity) == before; {
		if time.Now().After(deadline) {
			t.Fatal("the router does not present the new certificate after 10s")
		}
	}
}

// TestRouteGeneratedCertificate checks that without files a certificate is generated at each start.
func TestRouteGeneratedCertificate(t *testing.T) {
	var seen []string
	for range 2 {
		identity, _, err := serverTLS(ServeConfig{Address: "127.0.0.1:8443"})
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, servedCertificate(t, identity))
	}
	if seen[0] == seen[1] {
		t.Error("two starts generated the same certificate")
	}
}
