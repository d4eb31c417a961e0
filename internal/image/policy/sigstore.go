package policy

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
)

// readPublicKeys reads public keys in PEM.
func readPublicKeys(files [][]byte) ([]crypto.PublicKey, error) {
	var keys []crypto.PublicKey
	for _, file := range files {
		block, _ := pem.Decode(file)
		if block == nil {
			return nil, errors.New("key: not PEM")
		}
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("key: the PEM block %q is not a public key: %w", block.Type, err)
		}
		switch key.(type) {
		case *ecdsa.PublicKey, *rsa.PublicKey, ed25519.PublicKey:
			keys = append(keys, key)
		default:
			return nil, fmt.Errorf("key: the type %T is not supported", key)
		}
	}
	return keys, nil
}

// verifySigstore returns the payload of a signature by one of the keys. cosign signs the payload's SHA-256, and with
// Ed25519 the payload itself.
func verifySigstore(keys []crypto.PublicKey, s Sigstore) ([]byte, error) {
	sum := sha256.Sum256(s.Payload)
	for _, key := range keys {
		valid := false
		switch key := key.(type) {
		case *ecdsa.PublicKey:
			valid = ecdsa.VerifyASN1(key, sum[:], s.Signature)
		case *rsa.PublicKey:
			valid = rsa.VerifyPKCS1v15(key, crypto.SHA256, sum[:], s.Signature) == nil
		case ed25519.PublicKey:
			valid = ed25519.Verify(key, s.Payload, s.Signature)
		}
		if valid {
			return s.Payload, nil
		}
	}
	return nil, errors.New("it was not made with a key of the policy")
}
