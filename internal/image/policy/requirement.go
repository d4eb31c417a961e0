package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// Types of requirements.
const (
	acceptAnything  = "insecureAcceptAnything"
	reject          = "reject"
	signedBy        = "signedBy"
	sigstoreSigned  = "sigstoreSigned"
	signedBaseLayer = "signedBaseLayer"
)

// requirement is one requirement of a policy.json.
type requirement struct {
	Type string `json:"type"`

	KeyType  string   `json:"keyType"`
	KeyPath  string   `json:"keyPath"`
	KeyPaths []string `json:"keyPaths"`
	KeyData  []byte   `json:"keyData"`
	KeyDatas [][]byte `json:"keyDatas"`

	SignedIdentity *identity `json:"signedIdentity"`

	// These are refused.
	Fulcio              json.RawMessage `json:"fulcio"`
	PKI                 json.RawMessage `json:"pki"`
	RekorPublicKeyPath  json.RawMessage `json:"rekorPublicKeyPath"`
	RekorPublicKeyPaths json.RawMessage `json:"rekorPublicKeyPaths"`
	RekorPublicKeyData  json.RawMessage `json:"rekorPublicKeyData"`
	RekorPublicKeyDatas json.RawMessage `json:"rekorPublicKeyDatas"`
	BaseLayerIdentity   json.RawMessage `json:"baseLayerIdentity"`
}

func (r *requirement) validate() error {
	for name, field := range map[string]json.RawMessage{
		"fulcio": r.Fulcio, "pki": r.PKI, "rekorPublicKeyPath": r.RekorPublicKeyPath, "rekorPublicKeyPaths": r.RekorPublicKeyPaths,
		"rekorPublicKeyData": r.RekorPublicKeyData, "rekorPublicKeyDatas": r.RekorPublicKeyDatas, "baseLayerIdentity": r.BaseLayerIdentity,
	} {
		if field != nil {
			return fmt.Errorf("%q is not supported; signatures are checked only with keys", name)
		}
	}
	switch r.Type {
	case acceptAnything, reject:
		if r.keys() != 0 || r.KeyType != "" || r.SignedIdentity != nil {
			return fmt.Errorf("%q has neither keys nor an identity", r.Type)
		}
		return nil
	case signedBy:
		if r.KeyType != "GPGKeys" {
			return fmt.Errorf("keyType %q is not supported; it must be \"GPGKeys\"", r.KeyType)
		}
		if r.KeyDatas != nil {
			return errors.New(`"keyDatas" belongs to "sigstoreSigned"`)
		}
	case sigstoreSigned:
		if r.KeyType != "" {
			return errors.New(`"keyType" belongs to "signedBy"`)
		}
	case signedBaseLayer:
		return fmt.Errorf("%q is not supported", r.Type)
	default:
		return fmt.Errorf("unknown type %q", r.Type)
	}
	if r.keys() != 1 {
		return errors.New("exactly one of keyPath, keyPaths, keyData and keyDatas must be set")
	}
	if r.SignedIdentity == nil {
		r.SignedIdentity = &identity{Type: matchRepoDigestOrExact}
	}
	return r.SignedIdentity.validate()
}

// keys returns how many of the fields for keys are set.
func (r *requirement) keys() (n int) {
	for _, set := range []bool{r.KeyPath != "", len(r.KeyPaths) > 0, len(r.KeyData) > 0, len(r.KeyDatas) > 0} {
		if set {
			n++
		}
	}
	return n
}

// keyFiles returns the contents of all key files.
func (r *requirement) keyFiles() ([][]byte, error) {
	if len(r.KeyData) > 0 {
		return [][]byte{r.KeyData}, nil
	}
	files := slices.Clone(r.KeyDatas)
	paths := r.KeyPaths
	if r.KeyPath != "" {
		paths = []string{r.KeyPath}
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("key: %w", err)
		}
		files = append(files, data)
	}
	return files, nil
}

// check returns nil if one signature meets the requirement, otherwise the reasons for which each of them does not.
func (r *requirement) check(named reference.Named, subjects []digest.Digest, signatures Signatures) error {
	if r.Type == acceptAnything {
		return nil
	}
	verify, count, err := r.verifier(signatures)
	if err != nil {
		return err
	}
	if count == 0 {
		return errors.New("the image has no signature")
	}
	var reasons []error
	for i := range count {
		payload, err := verify(i)
		if err == nil {
			err = r.accepts(payload, named, subjects)
		}
		if err == nil {
			return nil
		}
		reasons = append(reasons, fmt.Errorf("signature %d: %w", i+1, err))
	}
	return errors.Join(reasons...)
}

// verifier returns a function that verifies one of the signatures and returns its payload, and how many there are.
func (r *requirement) verifier(signatures Signatures) (verify func(int) ([]byte, error), count int, err error) {
	files, err := r.keyFiles()
	if err != nil {
		return nil, 0, err
	}
	if r.Type == signedBy {
		ring, err := readKeyRing(files)
		return func(i int) ([]byte, error) { return verifyMessage(ring, signatures.Simple[i]) }, len(signatures.Simple), err
	}
	keys, err := readPublicKeys(files)
	return func(i int) ([]byte, error) { return verifySigstore(keys, signatures.Sigstore[i]) }, len(signatures.Sigstore), err
}

// payloadTypes are the types that signatures have in their payload.
var payloadTypes = map[string]string{signedBy: "atomic container signature", sigstoreSigned: "cosign container image signature"}

// accepts checks what a valid signature says.
func (r *requirement) accepts(document []byte, named reference.Named, subjects []digest.Digest) error {
	var payload struct {
		Critical struct {
			Type  string `json:"type"`
			Image struct {
				Digest digest.Digest `json:"docker-manifest-digest"`
			} `json:"image"`
			Identity struct {
				Reference string `json:"docker-reference"`
			} `json:"identity"`
		} `json:"critical"`
		Optional json.RawMessage `json:"optional"`
	}
	if err := decode(document, &payload); err != nil {
		return fmt.Errorf("the signed text is not a signature's: %w", err)
	}
	c := payload.Critical
	if c.Type != payloadTypes[r.Type] {
		return fmt.Errorf("the signed text has the type %q, not %q", c.Type, payloadTypes[r.Type])
	}
	if !slices.Contains(subjects, c.Image.Digest) {
		return fmt.Errorf("it is for the digest %q", c.Image.Digest)
	}
	if !r.SignedIdentity.matches(named, c.Identity.Reference) {
		return fmt.Errorf("it is for the image %q, which %s does not accept", c.Identity.Reference, r.SignedIdentity.Type)
	}
	return nil
}
