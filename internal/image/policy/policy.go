package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// ErrRefused means that the policy does not let the image run.
var ErrRefused = errors.New("refused by the signature policy")

// Policy is the content of a policy.json.
type Policy struct {
	fallback []requirement
	// scopes are those of the transport "docker". The empty scope contains all images.
	scopes map[string][]requirement
}

// Load reads a policy.json. The error is errdefs.ErrFailedPrecondition if the file is missing or invalid.
func Load(path string) (*Policy, error) {
	document, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("signature policy: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	p, err := Parse(document)
	if err != nil {
		return nil, fmt.Errorf("signature policy %s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	return p, nil
}

// Parse parses a policy.json. Unknown fields are errors, because they may be restrictions.
func Parse(document []byte) (*Policy, error) {
	var file struct {
		Default    []json.RawMessage                       `json:"default"`
		Transports map[string]map[string][]json.RawMessage `json:"transports"`
	}
	if err := decode(document, &file); err != nil {
		return nil, err
	}
	fallback, err := parseRequirements("default", file.Default)
	if err != nil {
		return nil, err
	}
	p := &Policy{fallback: fallback, scopes: map[string][]requirement{}}
	for scope, raw := range file.Transports["docker"] {
		if p.scopes[scope], err = parseRequirements(fmt.Sprintf("transports.docker[%q]", scope), raw); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// decode decodes exactly one JSON value without unknown fields.
func decode(document []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(document))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is text after the JSON value")
	}
	return nil
}

func parseRequirements(field string, raw []json.RawMessage) ([]requirement, error) {
	if len(raw) == 0 {
		return nil, fmt.Errorf("%s has no requirements; %q accepts all images", field, acceptAnything)
	}
	all := make([]requirement, len(raw))
	for i, document := range raw {
		if err := decode(document, &all[i]); err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
		if err := all[i].validate(); err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
	}
	return all, nil
}

// For returns the requirements for an image. The reference must have a tag or a digest.
func (p *Policy) For(named reference.Named) Requirements {
	for _, scope := range append(scopesOf(named), "") {
		if all, ok := p.scopes[scope]; ok {
			return Requirements{named, all}
		}
	}
	return Requirements{named, p.fallback}
}

// scopesOf returns the scopes that contain an image, the most specific first: the image, its repository, each namespace,
// the host with its port, and wildcards for the host's domains.
func scopesOf(named reference.Named) []string {
	scopes := []string{named.String()}
	name := named.Name()
	for {
		scopes = append(scopes, name)
		at := strings.LastIndexByte(name, '/')
		if at < 0 {
			break
		}
		name = name[:at]
	}
	host, _, _ := strings.Cut(name, ":")
	for {
		_, domain, ok := strings.Cut(host, ".")
		if !ok {
			return scopes
		}
		scopes, host = append(scopes, "*."+domain), domain
	}
}

// Requirements are the requirements for one image.
type Requirements struct {
	named reference.Named
	all   []requirement
}

// Rejected returns ErrRefused if no signature can make the image acceptable.
func (r Requirements) Rejected() error {
	for _, req := range r.all {
		if req.Type == reject {
			return fmt.Errorf("image %s is rejected: %w", r.named, ErrRefused)
		}
	}
	return nil
}

// NeedsSimple reports whether Check needs the image's OpenPGP signatures.
func (r Requirements) NeedsSimple() bool { return r.needs(signedBy) }

// NeedsSigstore reports whether Check needs the image's sigstore signatures.
func (r Requirements) NeedsSigstore() bool { return r.needs(sigstoreSigned) }

func (r Requirements) needs(kind string) bool {
	for _, req := range r.all {
		if req.Type == kind {
			return true
		}
	}
	return false
}

// Signatures are the signatures of an image. None of them is trusted.
type Signatures struct {
	// Simple are OpenPGP messages in the format of containers-signature(5).
	Simple [][]byte
	// Sigstore are cosign's signatures with a payload of the same format.
	Sigstore []Sigstore
}

// Sigstore is one signature of cosign.
type Sigstore struct {
	Payload []byte
	// Signature is the signature of Payload.
	Signature []byte
}

// Check returns ErrRefused unless the image meets all requirements. The subjects are the digests that identify the
// image: its manifest's and, if the image is part of an index, the index's. A signature of any of them is enough.
func (r Requirements) Check(subjects []digest.Digest, signatures Signatures) error {
	if err := r.Rejected(); err != nil {
		return err
	}
	for _, req := range r.all {
		if err := req.check(r.named, subjects, signatures); err != nil {
			return fmt.Errorf("image %s: %s: %w: %w", r.named, req.Type, err, ErrRefused)
		}
	}
	return nil
}
