package policy

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"crypto"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

var (
	subject = digest.FromString("manifest")
	other   = digest.FromString("another manifest")
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func named(t *testing.T, ref string) reference.Named {
	t.Helper()
	n, err := reference.ParseDockerRef(ref)
	check(t, err)
	return n
}

// policyOf returns a policy with one requirement for all images.
func policyOf(t *testing.T, requirement map[string]any) *Policy {
	t.Helper()
	document, err := json.Marshal(map[string]any{"default": []any{requirement}})
	check(t, err)
	p, err := Parse(document)
	check(t, err)
	return p
}

func payload(kind, ref string, dgst digest.Digest) []byte {
	return fmt.Appendf(nil,
		`{"critical":{"type":%q,"image":{"docker-manifest-digest":%q},"identity":{"docker-reference":%q}},"optional":{"creator":"test"}}`,
		payloadTypes[kind], dgst, ref)
}

func TestMostSpecificScopeApplies(t *testing.T) {
	p, err := Parse([]byte(`{"default":[{"type":"reject"}],"transports":{"docker-daemon":{"":[{"type":"anything"}]},"docker":{
		"r.example:5000/a/b:1":[{"type":"insecureAcceptAnything"}], "r.example:5000/a/b":[{"type":"reject"}],
		"r.example:5000/a":[{"type":"insecureAcceptAnything"}], "r.example:5000":[{"type":"reject"}],
		"*.example":[{"type":"insecureAcceptAnything"}], "docker.io/library":[{"type":"insecureAcceptAnything"}]}}}`))
	check(t, err)
	for ref, accepted := range map[string]bool{
		"r.example:5000/a/b:1": true, "r.example:5000/a/b:2": false, "r.example:5000/a/b@" + string(subject): false,
		"r.example:5000/a/bc:1": true,
		"r.example:5000/ab:1":   false, "s.example/x:1": true, "t.s.example/x:1": true, "example/x:1": false, "busybox": true,
		"docker.io/user/x:1": false,
		"elsewhere.test/x:1": false,
	} {
		err := p.For(named(t, ref)).Check([]digest.Digest{subject}, Signatures{})
		if accepted != (err == nil) || err != nil && !errors.Is(err, ErrRefused) {
			t.Errorf("%s: got error %v, want acceptance %v", ref, err, accepted)
		}
	}
}

func TestInvalidPolicies(t *testing.T) {
	for document, word := range map[string]string{
		``:                                "EOF",
		`{}`:                              "no requirements",
		`{"default":[]}`:                  "no requirements",
		`{"default":[{"type":"accept"}]}`: `unknown type "accept"`,
		`{"default":[{"type":"reject"}],"extra":1}`:                                                                  "extra",
		`{"default":[{"type":"reject"}]} {}`:                                                                         "after",
		`{"default":[{"type":"reject","keyPath":"/k"}]}`:                                                             "neither",
		`{"default":[{"type":"signedBy","keyPath":"/k"}]}`:                                                           "keyType",
		`{"default":[{"type":"signedBy","keyType":"GPGKeys"}]}`:                                                      "exactly one",
		`{"default":[{"type":"sigstoreSigned","keyPath":"/k","keyData":"YQ=="}]}`:                                    "exactly one",
		`{"default":[{"type":"sigstoreSigned","fulcio":{},"rekorPublicKeyPath":"/k"}]}`:                              "not supported",
		`{"default":[{"type":"signedBaseLayer","baseLayerIdentity":{}}]}`:                                            "not supported",
		`{"default":[{"type":"sigstoreSigned","keyPath":"/k","signedIdentity":{"type":"any"}}]}`:                     `unknown type "any"`,
		`{"default":[{"type":"sigstoreSigned","keyPath":"/k","signedIdentity":{"type":"exactReference"}}]}`:          "dockerReference",
		`{"default":[{"type":"sigstoreSigned","keyPath":"/k","signedIdentity":{"type":"matchExact","prefix":"a"}}]}`: "another type",
		`{"default":[{"type":"reject"}],"transports":{"docker":{"r.example":[]}}}`:                                   "r.example",
	} {
		if _, err := Parse([]byte(document)); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("Parse(%s): got error %v, want one with %q", document, err, word)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "policy.json")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Load of a missing file: got error %v, want ErrFailedPrecondition", err)
	}
}

func TestSignedIdentity(t *testing.T) {
	at := "@" + string(subject)
	for _, c := range []struct {
		identity      identity
		image, signed string
		want          bool
	}{
		{identity{Type: matchExact}, "r.example/a:1", "r.example/a:1", true},
		{identity{Type: matchExact}, "r.example/a:1", "r.example/a:2", false},
		{identity{Type: matchExact}, "r.example/a:1", "r.example/a", false},
		{identity{Type: matchExact}, "r.example/a" + at, "r.example/a:1", false},
		{identity{Type: matchRepoDigestOrExact}, "r.example/a:1", "r.example/a:1", true},
		{identity{Type: matchRepoDigestOrExact}, "r.example/a:1", "r.example/a:2", false},
		{identity{Type: matchRepoDigestOrExact}, "r.example/a" + at, "r.example/a:2", true},
		{identity{Type: matchRepoDigestOrExact}, "r.example/a" + at, "r.example/b:2", false},
		{identity{Type: matchRepository}, "r.example/a:1", "r.example/a", true},
		{identity{Type: matchRepository}, "r.example/a:1", "r.example/ab", false},
		{identity{Type: matchRepository}, "busybox", "docker.io/library/busybox:2", true},
		{identity{Type: exactReference, DockerReference: "s.example/b:3"}, "r.example/a:1", "s.example/b:3", true},
		{identity{Type: exactReference, DockerReference: "s.example/b:3"}, "r.example/a:1", "r.example/a:1", false},
		{identity{Type: exactRepository, DockerRepository: "s.example/b"}, "r.example/a:1", "s.example/b:9", true},
		{identity{Type: exactRepository, DockerRepository: "s.example/b"}, "r.example/a:1", "s.example/bc:9", false},
		{identity{Type: remapIdentity, Prefix: "mirror.example", SignedPrefix: "r.example/x"}, "mirror.example/a:1", "r.example/x/a:1", true},
		{identity{Type: remapIdentity, Prefix: "mirror.example", SignedPrefix: "r.example/x"}, "mirror.example/a:1", "mirror.example/a:1", false},
		{identity{Type: remapIdentity, Prefix: "mirror.example/a", SignedPrefix: "r.example/x"}, "mirror.example/ab:1", "mirror.example/ab:1",
			true},
		{identity{Type: matchExact}, "r.example/a:1", "R.EXAMPLE//", false},
	} {
		check(t, c.identity.validate())
		if got := c.identity.matches(named(t, c.image), c.signed); got != c.want {
			t.Errorf("%+v: image %s, signature for %s: got %v, want %v", c.identity, c.image, c.signed, got, c.want)
		}
	}
}

func publicPEM(t *testing.T, key crypto.PublicKey) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	check(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func sign(t *testing.T, key crypto.Signer, text []byte) Sigstore {
	t.Helper()
	sum, hash := sha256.Sum256(text), crypto.SHA256
	message := sum[:]
	if _, ok := key.(ed25519.PrivateKey); ok {
		message, hash = text, crypto.Hash(0)
	}
	signature, err := key.Sign(rand.Reader, message, hash)
	check(t, err)
	return Sigstore{text, signature}
}

func TestSigstoreSigned(t *testing.T) {
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	check(t, err)
	long, err := rsa.GenerateKey(rand.Reader, 2048)
	check(t, err)
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	check(t, err)
	good := payload(sigstoreSigned, "r.example/a", subject)
	for name, key := range map[string]crypto.Signer{"P-256": p256, "P-384": p384, "RSA": long, "Ed25519": edwards} {
		r := policyOf(t, map[string]any{"type": sigstoreSigned, "keyData": publicPEM(t, key.Public()),
			"signedIdentity": map[string]any{"type": matchRepository}}).
			For(named(t, "r.example/a:1"))
		stranger, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(t, err)
		altered := sign(t, key, good)
		altered.Payload = payload(sigstoreSigned, "r.example/a", other)
		for what, c := range map[string]struct {
			signatures []Sigstore
			reason     string
		}{
			"signed":                    {[]Sigstore{sign(t, key, good)}, ""},
			"second signature":          {[]Sigstore{sign(t, stranger, good), sign(t, key, good)}, ""},
			"unsigned":                  {nil, "no signature"},
			"another key":               {[]Sigstore{sign(t, stranger, good)}, "not made with a key"},
			"altered":                   {[]Sigstore{altered}, "not made with a key"},
			"another image":             {[]Sigstore{sign(t, key, payload(sigstoreSigned, "r.example/a", other))}, "for the digest"},
			"another name":              {[]Sigstore{sign(t, key, payload(sigstoreSigned, "r.example/b", subject))}, "for the image"},
			"another format":            {[]Sigstore{sign(t, key, payload(signedBy, "r.example/a", subject))}, "type"},
			"signed, but not a payload": {[]Sigstore{sign(t, key, []byte("hello"))}, "signed text"},
		} {
			err := r.Check([]digest.Digest{digest.FromString("index"), subject}, Signatures{Sigstore: c.signatures})
			if c.reason == "" && err != nil || c.reason != "" && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), c.reason)) {
				t.Errorf("%s, %s: got error %v, want %q", name, what, err, c.reason)
			}
		}
	}
}

// A policy can require two signatures, and a key that cannot be read refuses the image.
func TestAllRequirementsApply(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	file := filepath.Join(t.TempDir(), "key.pub")
	check(t, os.WriteFile(file, publicPEM(t, key.Public()), 0o600))
	requirement := func(path string) string {
		return fmt.Sprintf(`{"type":"sigstoreSigned","keyPath":%q,"signedIdentity":{"type":"matchRepository"}}`, path)
	}
	signed := Signatures{Sigstore: []Sigstore{sign(t, key, payload(sigstoreSigned, "r.example/a", subject))}}
	for document, reason := range map[string]string{
		requirement(file): "",
		requirement(file) + `,{"type":"insecureAcceptAnything"}`:          "",
		requirement(file) + `,{"type":"reject"}`:                          "rejected",
		requirement(file) + "," + requirement(file+".missing"):            "no such file",
		requirement(file) + `,{"type":"sigstoreSigned","keyData":"YQ=="}`: "not PEM",
	} {
		p, err := Parse([]byte(`{"default":[` + document + `]}`))
		check(t, err)
		err = p.For(named(t, "r.example/a:1")).Check([]digest.Digest{subject}, signed)
		if reason == "" && err != nil || reason != "" && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), reason)) {
			t.Errorf("%s: got error %v, want %q", document, err, reason)
		}
	}
}

func newEntity(t *testing.T, config *packet.Config) *openpgp.Entity {
	t.Helper()
	e, err := openpgp.NewEntity("test", "", "test@example.test", config)
	check(t, err)
	return e
}

func publicKey(t *testing.T, e *openpgp.Entity) []byte {
	t.Helper()
	var b bytes.Buffer
	check(t, e.Serialize(&b))
	return b.Bytes()
}

func message(t *testing.T, e *openpgp.Entity, text []byte, config *packet.Config) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := openpgp.Sign(&b, e, nil, config)
	check(t, err)
	_, err = w.Write(text)
	check(t, err)
	check(t, w.Close())
	return b.Bytes()
}

func TestSignedBy(t *testing.T) {
	old := &packet.Config{Time: func() time.Time { return time.Now().Add(-48 * time.Hour) }, KeyLifetimeSecs: 3600}
	short := &packet.Config{Time: old.Time, SigLifetimeSecs: 3600}
	key, stranger, expired := newEntity(t, &packet.Config{Time: old.Time}), newEntity(t, nil), newEntity(t, old)
	r := policyOf(t, map[string]any{"type": signedBy, "keyType": "GPGKeys",
		"keyData": slices.Concat(publicKey(t, key), publicKey(t, expired))}).For(named(t, "r.example/a:1"))
	good := payload(signedBy, "r.example/a:1", subject)
	cut := message(t, key, good, nil)
	for what, c := range map[string]struct {
		message []byte
		reason  string
	}{
		"signed":            {message(t, key, good, nil), ""},
		"another key":       {message(t, stranger, good, nil), "unknown key"},
		"expired key":       {message(t, expired, good, old), "expired"},
		"expired signature": {message(t, key, good, short), "expired"},
		"truncated":         {cut[:len(cut)-20], "signature 1"},
		"not OpenPGP":       {good, "not a signed"},
		"another image":     {message(t, key, payload(signedBy, "r.example/a:1", other), nil), "for the digest"},
		"another tag":       {message(t, key, payload(signedBy, "r.example/a:2", subject), nil), "for the image"},
	} {
		err := r.Check([]digest.Digest{subject}, Signatures{Simple: [][]byte{c.message}})
		if c.reason == "" && err != nil || c.reason != "" && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), c.reason)) {
			t.Errorf("%s: got error %v, want %q", what, err, c.reason)
		}
	}
}

func TestLookaside(t *testing.T) {
	dir, files := t.TempDir(), t.TempDir()
	server := httptest.NewServer(http.StripPrefix("/base", http.FileServer(http.Dir(files))))
	defer server.Close()
	name := fmt.Sprintf("team/app@sha256=%s", subject.Encoded())
	check(t, os.MkdirAll(filepath.Join(files, name), 0o700))
	for n, text := range []string{"one", "two"} {
		check(t, os.WriteFile(filepath.Join(files, name, fmt.Sprintf("signature-%d", n+1)), []byte(text), 0o600))
	}
	yaml := fmt.Sprintf("default-docker:\n  sigstore: file://%s\ndocker:\n  r.example:\n    use-sigstore-attachments: true\n    lookaside: %s/base\n  down.example:\n    lookaside: http://127.0.0.1:1\n", files, server.URL)
	check(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(yaml), 0o600))
	for _, host := range []string{"r.example", "default.example"} {
		got, err := Lookaside(t.Context(), http.DefaultClient, dir, named(t, host+"/team/app:1"), []digest.Digest{other, subject})
		check(t, err)
		if len(got) != 2 || string(got[0]) != "one" || string(got[1]) != "two" {
			t.Errorf("%s: got signatures %q, want one and two", host, got)
		}
	}
	_, err := Lookaside(t.Context(), http.DefaultClient, dir, named(t, "down.example/a:1"), []digest.Digest{subject})
	if !errdefs.IsUnavailable(err) {
		t.Errorf("got error %v, want ErrUnavailable", err)
	}
	check(t, os.WriteFile(filepath.Join(dir, "b.yaml"), []byte("docker: ["), 0o600))
	_, err = Lookaside(t.Context(), http.DefaultClient, dir, named(t, "r.example/a:1"), []digest.Digest{subject})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "b.yaml") {
		t.Errorf("got error %v, want ErrFailedPrecondition about b.yaml", err)
	}
}

func FuzzVerifyMessage(f *testing.F) {
	e, err := openpgp.NewEntity("fuzz", "", "", nil)
	if err != nil {
		f.Fatal(err)
	}
	var b bytes.Buffer
	w, err := openpgp.Sign(&b, e, nil, nil)
	if err != nil {
		f.Fatal(err)
	}
	if err := w.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, message []byte) {
		// Only a message by the key may have content. The seed is the only such message, and its content is empty.
		if content, err := verifyMessage(openpgp.EntityList{e}, message); err == nil && len(content) > 0 {
			t.Errorf("a forged message was accepted: %q", content)
		}
	})
}

// TestLookasideIsLimited: all signatures of an image together are limited, and too many are refused.
func TestLookasideIsLimited(t *testing.T) {
	for name, c := range map[string]struct{ count, size int }{"signatures": {maxSignatures/2 + 1, 1}, "bytes": {1, maxBytes/2 + 1}} {
		dir, files := t.TempDir(), t.TempDir()
		check(t, os.WriteFile(filepath.Join(dir, "a.yaml"), fmt.Appendf(nil, "default-docker:\n  lookaside: file://%s\n", files), 0o600))
		for _, d := range []digest.Digest{subject, other} {
			path := filepath.Join(files, fmt.Sprintf("app@sha256=%s", d.Encoded()))
			check(t, os.Mkdir(path, 0o700))
			for n := range c.count {
				check(t, os.WriteFile(filepath.Join(path, fmt.Sprintf("signature-%d", n+1)), make([]byte, c.size), 0o600))
			}
		}
		look := func(subjects ...digest.Digest) error {
			_, err := Lookaside(t.Context(), http.DefaultClient, dir, named(t, "r.example/app:1"), subjects)
			return err
		}
		check(t, look(subject))
		if err := look(subject, other); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: got error %v, want ErrInvalidArgument", name, err)
		}
	}
}
