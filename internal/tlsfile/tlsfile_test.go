package tlsfile_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/tlsfile"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write writes a certificate with this serial number, which is its own authority, and its key.
func write(t *testing.T, pair tlsfile.Pair, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true,
		DNSNames:              []string{"node"}, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	check(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	check(t, err)
	check(t, os.WriteFile(pair.Certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	check(t, os.WriteFile(pair.Key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
}

// serial connects a client to a server, and returns the serial number of the server's certificate.
func serial(t *testing.T, client, server *tls.Config) (int64, error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	check(t, err)
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			defer conn.Close()
			err = conn.(*tls.Conn).Handshake()
		}
		accepted <- err
	}()
	conn, err := tls.Dial("tcp", l.Addr().String(), client)
	if err == nil {
		defer conn.Close()
	}
	if err := errors.Join(err, <-accepted); err != nil {
		return 0, err
	}
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), nil
}

// TestRenewed: both sides use the files as they are at each handshake, and each believes only its authorities.
func TestRenewed(t *testing.T) {
	dir := t.TempDir()
	pair := tlsfile.Pair{Certificate: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	for n := range int64(2) {
		write(t, pair, n+1)
		server, err := pair.Server(pair.Certificate)
		check(t, err)
		client, err := pair.Client(pair.Certificate)
		check(t, err)
		stranger, err := tlsfile.Pair{}.Client(pair.Certificate)
		check(t, err)
		client.ServerName, stranger.ServerName = "node", "node"
		if got, err := serial(t, client, server); err != nil || got != n+1 {
			t.Errorf("certificate %d: got %d, error %v", n+1, got, err)
		}
		if _, err := serial(t, stranger, server); err == nil {
			t.Error("a client without a certificate is accepted")
		}
		write(t, pair, n+10) // the authorities stay, so that the new certificate is a stranger's
		if _, err := serial(t, client, server); err == nil {
			t.Error("the files were not read again")
		}
	}
}

// TestUnreadable: files that cannot be used are errors at the start.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	pair := tlsfile.Pair{Certificate: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	write(t, pair, 1)
	missing := tlsfile.Pair{Certificate: pair.Certificate, Key: filepath.Join(dir, "missing.pem")}
	for name, use := range map[string]func() error{
		"server's key":         func() error { _, err := missing.Server(""); return err },
		"client's key":         func() error { _, err := missing.Client(""); return err },
		"key as authority":     func() error { _, err := pair.Client(pair.Key); return err },
		"missing authority":    func() error { _, err := pair.Server(missing.Key); return err },
		"authorities directly": func() error { _, err := tlsfile.Authorities(missing.Key); return err },
	} {
		if err := use(); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: got error %v, want ErrFailedPrecondition", name, err)
		}
	}
}
