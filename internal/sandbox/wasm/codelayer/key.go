package codelayer

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// maxKey bounds a file with a key, in bytes.
const maxKey = 16 << 10

// PublicKey is an Ed25519 key (RFC 8032) whose signatures a node can accept. It implements dsse.Verifier.
type PublicKey struct {
	// Fingerprint identifies the key, in OpenSSH's form: "SHA256:" and base64.
	Fingerprint string
	key         ed25519.PublicKey
}

// ReadPublicKey reads a key from a PEM file (RFC 7468, "PUBLIC KEY"), as `openssl pkey -pubout` writes it. The error is
// errdefs.ErrInvalidArgument if the file has no Ed25519 key.
func ReadPublicKey(file string) (PublicKey, error) {
	der, err := readPEM(file, "PUBLIC KEY")
	if err != nil {
		return PublicKey{}, err
	}
	parsed, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return PublicKey{}, fmt.Errorf("key %s: %w: %w", file, err, errdefs.ErrInvalidArgument)
	}
	key, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return PublicKey{}, fmt.Errorf("key %s: it is a %T, not an Ed25519 key: %w", file, parsed, errdefs.ErrInvalidArgument)
	}
	return newPublicKey(key)
}

func newPublicKey(key ed25519.PublicKey) (PublicKey, error) {
	fingerprint, err := dsse.SHA256KeyID(key)
	return PublicKey{Fingerprint: fingerprint, key: key}, err
}

// ReadPrivateKey reads a key from a PEM file (RFC 5958, "PRIVATE KEY"), as `openssl genpkey -algorithm ed25519` writes it.
// The error is errdefs.ErrInvalidArgument if the file has no Ed25519 key, or an encrypted one.
func ReadPrivateKey(file string) (ed25519.PrivateKey, error) {
	der, err := readPEM(file, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("key %s: %w: %w", file, err, errdefs.ErrInvalidArgument)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("key %s: it is a %T, not an Ed25519 key: %w", file, parsed, errdefs.ErrInvalidArgument)
	}
	return key, nil
}

// readPEM returns the first block of a PEM file, which must have the given type.
func readPEM(file, kind string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxKey))
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("key %s: it is not a PEM file: %w", file, errdefs.ErrInvalidArgument)
	}
	if block.Type != kind {
		return nil, fmt.Errorf("key %s: it has a %q, not a %q: %w", file, block.Type, kind, errdefs.ErrInvalidArgument)
	}
	return block.Bytes, nil
}

// Verify implements dsse.Verifier.
func (k PublicKey) Verify(_ context.Context, data, signature []byte) error {
	if !ed25519.Verify(k.key, data, signature) {
		return errors.New("the signature is wrong")
	}
	return nil
}

// KeyID implements dsse.Verifier.
func (k PublicKey) KeyID() (string, error) { return k.Fingerprint, nil }

// Public implements dsse.Verifier.
func (k PublicKey) Public() crypto.PublicKey { return k.key }
