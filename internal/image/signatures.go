package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/policy"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/spans"
)

// ErrSignature is wrapped by the error of a pull that the signature policy refuses, or that cannot be decided because
// the policy is invalid.
var ErrSignature = errors.New("the image may not run on this node")

// Names that cosign gives to signatures.
const (
	cosignArtifactType = "application/vnd.dev.cosign.artifact.sig.v1+json"
	cosignPayloadType  = "application/vnd.dev.cosign.simplesigning.v1+json"
	cosignAnnotation   = "dev.cosignproject.cosign/signature"
)

// Limits of what a registry can make a pull read to check signatures.
const (
	maxSignatures = 64
	// maxSignatureBytes limits a manifest, and all payloads together.
	maxSignatureBytes = 1 << 20
)

// lookasideClient reads signatures from lookaside stores.
var lookasideClient = &http.Client{Timeout: 30 * time.Second, CheckRedirect: registry.CheckRedirect}

// requirements returns the signature policy's requirements for an image, or nil without a policy. It reads the policy
// from its file, so that a change applies to the next pull. An image without a chance is refused here.
func (s *Store) requirements(named reference.Named) (*policy.Requirements, error) {
	if s.cfg.SignaturePolicy == "" {
		return nil, nil
	}
	p, err := policy.Load(s.cfg.SignaturePolicy)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSignature, err)
	}
	r := p.For(named)
	return &r, refusal(r.Rejected())
}

// admitUnsigned checks an image that comes from no registry and therefore has no signatures.
func (s *Store) admitUnsigned(named reference.Named) error {
	r, err := s.requirements(named)
	if r == nil || err != nil {
		return err
	}
	return refusal(r.Check(nil, policy.Signatures{}))
}

// refusal adds the class and the name to an error of the policy.
func refusal(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w: %w", ErrSignature, err, errdefs.ErrPermissionDenied)
}

// admit checks an image against the signature policy before its content is fetched. The subjects are the digests that
// the reference resolved to: of an index, if there is one, and of the manifest.
func (p *puller) admit(ctx context.Context, subjects ...digest.Digest) (err error) {
	if p.requires == nil {
		return nil
	}
	ctx, end := spans.Start(ctx, "image.verify")
	defer func() { end(err) }()
	if len(subjects) == 2 && subjects[0] == subjects[1] {
		subjects = subjects[:1]
	}
	defer p.tracker.Busy()()
	var found policy.Signatures
	if p.requires.NeedsSimple() {
		found.Simple, err = policy.Lookaside(ctx, lookasideClient, p.cfg.RegistriesDir, p.named, subjects)
	}
	if err == nil && p.requires.NeedsSigstore() {
		found.Sigstore, err = p.sigstoreSignatures(ctx, subjects)
	}
	if err != nil {
		return fmt.Errorf("look for signatures: %w", err)
	}
	return refusal(p.requires.Check(subjects, found))
}

// sigstoreSignatures fetches cosign's signatures of an image: those of the tag sha256-….sig, and referrers. It refuses
// too many before it fetches them.
func (p *puller) sigstoreSignatures(ctx context.Context, subjects []digest.Digest) ([]policy.Sigstore, error) {
	var manifests, payloads []ocispec.Descriptor
	for _, subject := range subjects {
		found, err := p.signatureManifests(ctx, subject)
		if err != nil {
			return nil, err
		}
		manifests = append(manifests, found...)
	}
	if len(manifests) > maxSignatures {
		return nil, failure.Invalidf("the image has more than %d manifests of signatures", maxSignatures)
	}
	for _, desc := range manifests {
		found, err := p.signaturesIn(ctx, desc)
		if err != nil {
			return nil, err
		}
		payloads = append(payloads, found...)
	}
	if len(payloads) > maxSignatures || sizes(payloads) > maxSignatureBytes {
		return nil, failure.Invalidf("the image has more than %d signatures, or more than %d bytes of them", maxSignatures, maxSignatureBytes)
	}
	all := make([]policy.Sigstore, len(payloads))
	for i, desc := range payloads {
		payload, err := p.smallBlob(ctx, desc)
		if err != nil {
			return nil, err
		}
		all[i] = policy.Sigstore{Payload: payload, Signature: signatureIn(desc)}
	}
	return all, nil
}

func (p *puller) signatureManifests(ctx context.Context, subject digest.Digest) ([]ocispec.Descriptor, error) {
	var found []ocispec.Descriptor
	tag := fmt.Sprintf("%s:%s-%s.sig", reference.TrimNamed(p.named), subject.Algorithm(), subject.Encoded())
	_, desc, err := p.remote.Resolve(ctx, tag)
	if err == nil {
		found = append(found, desc)
	} else if !errdefs.IsNotFound(failure.WithClass(err)) {
		return nil, err
	}
	fetcher, ok := p.registry.(remotes.ReferrersFetcher)
	if !ok {
		return found, nil
	}
	referrers, err := fetcher.FetchReferrers(ctx, subject, remotes.WithReferrerArtifactTypes(cosignArtifactType))
	if err != nil && !errdefs.IsNotFound(failure.WithClass(err)) {
		return nil, fmt.Errorf("referrers: %w", err)
	}
	return append(found, referrers...), nil
}

// signaturesIn returns the payloads of the signatures in one manifest of cosign.
func (p *puller) signaturesIn(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if !images.IsManifestType(desc.MediaType) {
		return nil, nil
	}
	document, err := p.smallBlob(ctx, desc)
	if err != nil {
		return nil, err
	}
	var m ocispec.Manifest
	if err := json.Unmarshal(document, &m); err != nil {
		return nil, failure.Invalidf("manifest %s of signatures: %v", desc.Digest, err)
	}
	payloads := slices.DeleteFunc(m.Layers, func(l ocispec.Descriptor) bool {
		return l.MediaType != cosignPayloadType || len(signatureIn(l)) == 0
	})
	for _, payload := range payloads {
		if err := checkDescriptor("signature", payload, maxSignatureBytes); err != nil {
			return nil, err
		}
	}
	return payloads, nil
}

// signatureIn returns the signature of a payload, or nil.
func signatureIn(payload ocispec.Descriptor) []byte {
	signature, err := base64.StdEncoding.DecodeString(payload.Annotations[cosignAnnotation])
	if err != nil {
		return nil
	}
	return signature
}

// smallBlob reads a blob from the registry without storing it.
func (p *puller) smallBlob(ctx context.Context, desc ocispec.Descriptor) ([]byte, error) {
	desc = strip(desc)
	if err := checkDescriptor("signature", desc, maxSignatureBytes); err != nil {
		return nil, err
	}
	rc, err := p.registry.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	var data strings.Builder
	verifier := desc.Digest.Verifier()
	if _, err := io.Copy(io.MultiWriter(&data, verifier), io.LimitReader(rc, desc.Size)); err != nil {
		return nil, err
	}
	if !verifier.Verified() {
		return nil, fmt.Errorf("the registry's content is not blob %s: %w", desc.Digest, errdefs.ErrDataLoss)
	}
	return []byte(data.String()), nil
}
