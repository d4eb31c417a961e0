package image

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
)

// signer signs images as cosign does.
type signer struct {
	t   testing.TB
	key *ecdsa.PrivateKey
	// public is the file of the public key.
	public string
}

func newSigner(t testing.TB) *signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	check(t, err)
	s := &signer{t, key, filepath.Join(t.TempDir(), "cosign.pub")}
	check(t, os.WriteFile(s.public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o600))
	return s
}

// sign pushes a signature of a digest, as a tag or as a referrer.
func (s *signer) sign(reg *testRegistry, repo string, subject digest.Digest, asReferrer bool) {
	s.t.Helper()
	payload := fmt.Appendf(nil,
		`{"critical":{"identity":{"docker-reference":"%s/%s"},"image":{"docker-manifest-digest":"%s"},"type":"cosign container image signature"},"optional":null}`,
		reg.host, repo, subject)
	sum := sha256.Sum256(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, s.key, sum[:])
	check(s.t, err)
	layer := ocispec.Descriptor{
		MediaType: cosignPayloadType, Digest: digest.FromBytes(payload), Size: int64(len(payload)),
		Annotations: map[string]string{cosignAnnotation: base64.StdEncoding.EncodeToString(signature)},
	}
	config := []byte("{}")
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Layers: []ocispec.Descriptor{layer}}
	m.SchemaVersion = 2
	m.Config = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromBytes(config), Size: int64(len(config))}
	tag := strings.Replace(string(subject), ":", "-", 1)
	if !asReferrer {
		reg.pushRaw(s.t, repo, tag+".sig", m.MediaType, m, config, payload)
		return
	}
	m.Config.MediaType, m.ArtifactType = cosignArtifactType, cosignArtifactType
	document, err := json.Marshal(m)
	check(s.t, err)
	dgst := digest.FromBytes(document)
	reg.pushRaw(s.t, repo, string(dgst), m.MediaType, m, config, payload)
	// The registry of these tests lacks the referrers API; the specification's fallback is a tag.
	reg.pushRaw(s.t, repo, tag, ocispec.MediaTypeImageIndex, ocispec.Index{
		MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{{MediaType: m.MediaType, ArtifactType: cosignArtifactType, Digest: dgst, Size: int64(len(document))}},
	})
}

// policyFile writes a policy with requirements for one scope; all other images are rejected.
func policyFile(t testing.TB, scope, requirements string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.json")
	check(t, os.WriteFile(path, fmt.Appendf(nil, `{"default":[{"type":"reject"}],"transports":{"docker":{%q:[%s]}}}`, scope, requirements),
		0o600))
	return path
}

func (s *signer) requirement() string {
	return fmt.Sprintf(`{"type":"sigstoreSigned","keyPath":%q,"signedIdentity":{"type":"matchRepository"}}`, s.public)
}

func manifestDigest(t testing.TB, img interface{ Digest() (v1.Hash, error) }) digest.Digest {
	t.Helper()
	h, err := img.Digest()
	check(t, err)
	return digest.Digest(h.String())
}

func wantRefused(t testing.TB, err error, words ...string) {
	t.Helper()
	wantError(t, err, func(err error) bool { return errors.Is(err, ErrSignature) }, words...)
}

func TestSignaturePolicy(t *testing.T) {
	reg, key := newRegistry(t), newSigner(t)
	s := open(t, Config{SignaturePolicy: policyFile(t, reg.host, key.requirement())})
	app := oneFileImage(t, "signed")
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: oneFileImage(t, "in an index"),
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	tagged, referred := reg.push(t, "tagged:1", app), reg.push(t, "referred:1", app)
	whole, part := reg.push(t, "whole:1", index), reg.push(t, "part:1", index)
	unsigned := reg.push(t, "unsigned:1", app)
	vm := raw(t, nil)
	vm.manifest.Config.MediaType, vm.manifest.Layers = "application/vnd.example.disk",
		[]ocispec.Descriptor{vm.add(disk.MediaTypeRaw, make([]byte, 512))}
	key.sign(reg, "tagged", manifestDigest(t, app), false)
	key.sign(reg, "referred", manifestDigest(t, app), true)
	key.sign(reg, "whole", manifestDigest(t, index), false)
	list, err := index.IndexManifest()
	check(t, err)
	key.sign(reg, "part", digest.Digest(list.Manifests[0].Digest.String()), false)

	for _, ref := range []string{tagged, referred, whole, part} {
		if _, err := s.Pull(t.Context(), ref, PullOptions{}); err != nil {
			t.Errorf("a signed image was refused: %v", err)
		}
	}
	reg.forget()
	_, err = s.Pull(t.Context(), unsigned, PullOptions{})
	wantRefused(t, err, unsigned, "no signature")
	_, err = s.Pull(t.Context(), vm.push(t, reg, "disk"), PullOptions{})
	wantRefused(t, err, "no signature")
	if n := reg.count("GET", "/blobs/"); n != 0 {
		t.Errorf("refused images: got %d requests for blobs, want none", n)
	}
	_, err = s.Pull(t.Context(), "other.invalid/app:1", PullOptions{})
	wantRefused(t, err, "rejected") // without asking the registry
	if _, err := s.Get(t.Context(), unsigned); !errdefs.IsNotFound(err) {
		t.Errorf("a refused image is stored: %v", err)
	}
}

// A stored image is checked again at its next pull, because its signature or the policy may be gone.
func TestSignaturePolicyAppliesToStoredImages(t *testing.T) {
	reg, key := newRegistry(t), newSigner(t)
	path := policyFile(t, reg.host, key.requirement())
	s := open(t, Config{SignaturePolicy: path})
	app := oneFileImage(t, "signed")
	ref := reg.push(t, "app:1", app)
	key.sign(reg, "app", manifestDigest(t, app), false)
	pull(t, s, ref)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".sig") {
			return false
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "look for signatures") // undecided rather than refused
	reg.setHook(nil)
	check(t, os.WriteFile(path, []byte(`{"default":[{"type":"reject"}]}`), 0o600))
	_, err = s.Pull(t.Context(), ref, PullOptions{})
	wantRefused(t, err, "rejected")
	for _, broken := range []string{`{"default":[]}`, `not JSON`} {
		check(t, os.WriteFile(path, []byte(broken), 0o600))
		_, err = s.Pull(t.Context(), ref, PullOptions{})
		wantRefused(t, err, path)
	}
	if _, err := s.Get(t.Context(), ref); err != nil {
		t.Errorf("the stored image is gone: %v", err)
	}
}

func TestSignaturePolicyForImagesWithoutRegistry(t *testing.T) {
	key := newSigner(t)
	s := open(t, Config{SignaturePolicy: policyFile(t, "edge.local/accepted", `{"type":"insecureAcceptAnything"}`)})
	config, layer := NewBlob(MediaTypeWasmConfig, []byte("{}")), NewBlob(MediaTypeWasm, wasmOf("text"))
	document, err := json.Marshal(ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: config.Descriptor,
		Layers: []ocispec.Descriptor{layer.Descriptor}})
	check(t, err)
	manifest := NewBlob(ocispec.MediaTypeImageManifest, document)
	_, err = s.Import(t.Context(), LocalPrefix+"accepted:1", manifest, config, layer)
	check(t, err)
	_, err = s.Import(t.Context(), LocalPrefix+"other:1", manifest, config, layer)
	wantRefused(t, err, "rejected")
	s.cfg.SignaturePolicy = policyFile(t, "edge.local", key.requirement())
	_, err = s.Import(t.Context(), LocalPrefix+"accepted:1", manifest, config, layer)
	wantRefused(t, err, "no signature")
}

// An encrypted layer is refused by name before anything is downloaded.
func TestEncryptedLayersAreRefused(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	for _, mediaType := range []string{
		"application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "application/vnd.docker.image.rootfs.diff.tar.gzip+encrypted",
		disk.MediaTypeRaw + "+encrypted",
	} {
		img := raw(t, tarOf(t, file("a", "text")))
		img.manifest.Layers[0].MediaType = mediaType
		_, err := s.Pull(t.Context(), img.push(t, reg, "app"), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, mediaType, "encrypted", string(img.manifest.Layers[0].Digest))
		if n := reg.count("GET", "/blobs/"); n != 0 {
			t.Errorf("%s: got %d requests for blobs, want none", mediaType, n)
		}
	}
}

// What a registry offers too much of is refused before it is fetched.
func TestTooManySignatures(t *testing.T) {
	reg, key := newRegistry(t), newSigner(t)
	s := open(t, Config{SignaturePolicy: policyFile(t, reg.host, key.requirement())})
	app := oneFileImage(t, "signed")
	many, payload := make([]ocispec.Descriptor, maxSignatures+1), []byte("payload")
	for i := range many {
		many[i] = ocispec.Descriptor{
			MediaType: cosignPayloadType, Digest: digest.FromBytes(payload), Size: int64(len(payload)),
			Annotations: map[string]string{cosignAnnotation: "c2ln"},
		}
	}
	large := many[:2:2]
	manifests := make([]ocispec.Descriptor, maxSignatures+1)
	for i := range manifests {
		manifests[i] = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, ArtifactType: cosignArtifactType,
			Digest: digest.FromString(fmt.Sprint(i)), Size: 2}
	}
	for name, push := range map[string]func(repo, tag string){
		"signatures": func(repo, tag string) {
			reg.pushRaw(t, repo, tag+".sig", ocispec.MediaTypeImageManifest,
				ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Layers: many}, payload)
		},
		"bytes": func(repo, tag string) {
			for i := range large {
				large[i].Size = maxSignatureBytes
			}
			reg.pushRaw(t, repo, tag+".sig", ocispec.MediaTypeImageManifest,
				ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Layers: large}, payload)
		},
		"manifests": func(_, _ string) {
			reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, "/referrers/") {
					return false
				}
				w.Header().Set("Content-Type", ocispec.MediaTypeImageIndex)
				check(t, json.NewEncoder(w).Encode(ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: manifests}))
				return true
			})
		},
	} {
		ref, subject := reg.push(t, name+":1", app), manifestDigest(t, app)
		push(name, strings.Replace(string(subject), ":", "-", 1))
		reg.forget()
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		reg.setHook(nil)
		wantError(t, err, errdefs.IsInvalidArgument, "more than 64")
		for _, forbidden := range []digest.Digest{digest.FromBytes(payload), manifests[0].Digest} {
			if n := reg.count("GET", string(forbidden)); n != 0 {
				t.Errorf("%s: got %d requests for %s, want none", name, n, forbidden)
			}
		}
	}
}

// Peers have no signatures, so the registry resolves an image that needs them, also by digest.
func TestSignedImageWithPeersFirst(t *testing.T) {
	reg, key := newRegistry(t), newSigner(t)
	app, first := oneFileImage(t, "signed"), open(t, Config{})
	key.sign(reg, "app", manifestDigest(t, app), false)
	have := pull(t, first, reg.push(t, "app:1", app))
	s := open(t, Config{
		SignaturePolicy: policyFile(t, reg.host, key.requirement()), Peers: Peers{Hosts: []string{mirrorOf(t, first)}, First: true, Tags: true},
	})
	byDigest := reg.ref("app@" + string(have.Manifest))
	reg.forget()
	pull(t, s, byDigest)
	if n := reg.count("GET", have.Layers[0].Digest.String()); n != 0 {
		t.Errorf("got %d requests for the layer at the registry, want none", n)
	}
	reg.away()
	for _, ref := range []string{byDigest, reg.ref("app:1")} {
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		wantError(t, err, errdefs.IsUnavailable)
	}
}
