package codelayer

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// Types of the envelope's content.
const (
	payloadType   = "application/vnd.in-toto+json"
	statementType = "https://in-toto.io/Statement/v1"
	predicateType = "https://tripod.run/attestations/wasm-code/v1"
)

const (
	// MaxEnvelope bounds an envelope, in bytes.
	MaxEnvelope = 64 << 10
	// MaxCode bounds decompressed code, in bytes: four times the default limit of a component.
	MaxCode = 512 << 20
	// maxSignatures bounds the signatures of an envelope.
	maxSignatures = 16
	// maxWindow bounds the memory, in bytes, that a layer can make its decompression use.
	maxWindow = 8 << 20
)

// Target says what code is for. Code runs only where all of it is the same, except that a node may have more features.
type Target struct {
	// Component is the digest of the component's binary.
	Component digest.Digest
	// Engine is the fingerprint of the engine: its version, its settings, and the operating system and architecture.
	Engine string
	// Features are those of the processor that the code may use; see HostFeatures.
	Features []string
}

// statement is the signed document, an in-toto statement (spec/v1/statement.md). Its subject is the layer.
type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     predicate `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

type predicate struct {
	Component digest.Digest `json:"component"`
	Engine    string        `json:"engine"`
	Features  []string      `json:"cpuFeatures"`
	Code      content       `json:"code"`
}

// content describes the decompressed code.
type content struct {
	Digest digest.Digest `json:"digest"`
	Size   int64         `json:"size"`
}

// Pack compresses code for a target into a layer, and signs a statement about it. The same arguments give the same bytes.
// The error is errdefs.ErrInvalidArgument if the code is empty or larger than MaxCode.
func Pack(ctx context.Context, key ed25519.PrivateKey, target Target, code []byte) (layer, envelope []byte, err error) {
	if len(code) == 0 || len(code) > MaxCode {
		return nil, nil, fmt.Errorf("the compiled code has %d bytes, not between 1 and %d: %w", len(code), MaxCode, errdefs.ErrInvalidArgument)
	}
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(maxWindow))
	if err != nil {
		return nil, nil, err
	}
	layer = encoder.EncodeAll(code, nil)
	about := statement{
		Type: statementType, PredicateType: predicateType,
		Subject: []subject{{Name: "code.zst", Digest: map[string]string{string(digest.SHA256): digest.FromBytes(layer).Encoded()}}},
		Predicate: predicate{
			Component: target.Component, Engine: target.Engine, Features: target.Features,
			Code: content{Digest: digest.FromBytes(code), Size: int64(len(code))},
		},
	}
	payload, err := json.Marshal(about)
	if err != nil {
		return nil, nil, err
	}
	if err := about.check(); err != nil {
		return nil, nil, err
	}
	signer, err := dsse.NewEnvelopeSigner(signingKey{key})
	if err != nil {
		return nil, nil, err
	}
	signed, err := signer.SignPayload(ctx, payloadType, payload)
	if err != nil {
		return nil, nil, fmt.Errorf("sign the compiled code: %w", err)
	}
	envelope, err = json.Marshal(signed)
	return layer, envelope, err
}

// Layer is a layer whose envelope Verify has accepted.
type Layer struct {
	// Key is the fingerprint of the key that has signed it; see PublicKey.Fingerprint.
	Key  string
	code content
}

// Verify checks the envelope of the layer with the given digest: that one of the keys has signed it, that it is about this
// layer, and that the code is for the node's target. A layer that may not be used has an error with a Reason.
func Verify(ctx context.Context, envelope []byte, layer digest.Digest, keys []PublicKey, node Target) (*Layer, error) {
	payload, key, err := open(ctx, envelope, keys)
	if err != nil {
		return nil, err
	}
	s, err := parseStatement(payload)
	if err != nil {
		return nil, err
	}
	if got := s.Subject[0].Digest[string(layer.Algorithm())]; got != layer.Encoded() {
		return nil, refuse(ReasonDamaged, "the statement is about the layer %s, not about %s", got, layer)
	}
	p := s.Predicate
	if p.Component != node.Component {
		return nil, refuse(ReasonComponent, "the code was compiled from the component %s, but the image's component is %s", p.Component,
			node.Component)
	}
	if p.Engine != node.Engine {
		return nil, refuse(ReasonEngine, "the code was compiled by the engine %s, but this node has %s", p.Engine, node.Engine)
	}
	missing := slices.DeleteFunc(slices.Clone(p.Features), func(f string) bool { return slices.Contains(node.Features, f) })
	if len(missing) > 0 {
		return nil, refuse(ReasonCPU, "the code was compiled for a processor with %s, which this node's lacks", strings.Join(missing, ", "))
	}
	return &Layer{Key: key, code: p.Code}, nil
}

// open returns the payload of an envelope, and the fingerprint of the key that has signed it.
func open(ctx context.Context, envelope []byte, keys []PublicKey) (payload []byte, key string, err error) {
	var e dsse.Envelope
	if len(envelope) > MaxEnvelope {
		return nil, "", refuse(ReasonStatement, "the envelope has %d bytes, more than %d", len(envelope), MaxEnvelope)
	}
	if err := json.Unmarshal(envelope, &e); err != nil {
		return nil, "", refuse(ReasonStatement, "the envelope: %v", err)
	}
	if e.PayloadType != payloadType || len(e.Signatures) == 0 || len(e.Signatures) > maxSignatures {
		return nil, "", refuse(ReasonStatement, "the envelope has a payload of the type %q and %d signatures, not %q and 1 to %d",
			e.PayloadType, len(e.Signatures), payloadType, maxSignatures)
	}
	var signers []string
	known := false
	for _, s := range e.Signatures {
		signers = append(signers, s.KeyID)
		// The key's name is optional (DSSE, protocol.md); without it, each key is tried.
		known = known || slices.ContainsFunc(keys, func(k PublicKey) bool { return s.KeyID == "" || k.Fingerprint == s.KeyID })
	}
	if !known {
		return nil, "", refuse(ReasonKey, "it is signed by the key %q, which is not among the accepted ones", signers)
	}
	verifiers := make([]dsse.Verifier, len(keys))
	for i, k := range keys {
		verifiers[i] = k
	}
	verifier, err := dsse.NewEnvelopeVerifier(verifiers...)
	if err != nil {
		return nil, "", err
	}
	accepted, payload, err := verifier.VerifyAndDecode(ctx, &e)
	if err != nil {
		return nil, "", refuse(ReasonSignature, "the signature: %v", err)
	}
	return payload, accepted[0].KeyID, nil
}

// parseStatement parses and checks a statement. It ignores fields that it does not know, as in-toto asks
// (spec/v1/README.md, "Parsing rules").
func parseStatement(payload []byte) (*statement, error) {
	var s statement
	if err := json.Unmarshal(payload, &s); err != nil {
		return nil, refuse(ReasonStatement, "the statement: %v", err)
	}
	if err := s.check(); err != nil {
		return nil, refuse(ReasonStatement, "the statement: %v", err)
	}
	return &s, nil
}

func (s *statement) check() error {
	p := s.Predicate
	switch {
	case s.Type != statementType || s.PredicateType != predicateType:
		return fmt.Errorf("it has the type %q with the predicate %q, not %q with %q", s.Type, s.PredicateType, statementType, predicateType)
	case len(s.Subject) != 1:
		return fmt.Errorf("it has %d subjects, not 1", len(s.Subject))
	case p.Engine == "":
		return errors.New("it names no engine")
	case p.Features == nil:
		return errors.New("it does not list the processor's features")
	case p.Code.Size <= 0 || p.Code.Size > MaxCode:
		return fmt.Errorf("the code has %d bytes, not between 1 and %d", p.Code.Size, MaxCode)
	}
	for name, d := range map[string]digest.Digest{"component": p.Component, "code": p.Code.Digest} {
		if err := d.Validate(); err != nil || d.Algorithm() != digest.SHA256 {
			return fmt.Errorf("the digest %q of the %s is not a SHA-256", d, name)
		}
	}
	return nil
}

// Unpack decompresses the layer, which the caller has compared with its digest. It writes at most as many bytes as the
// statement says. The error has ReasonDamaged if the content is not what was signed.
func (l *Layer) Unpack(ctx context.Context, layer io.Reader, to io.Writer) error {
	decoder, err := zstd.NewReader(layer, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return err
	}
	defer decoder.Close()
	sum := sha256.New()
	code := io.LimitReader(decoder, l.code.Size+1) // one byte more shows that there is too much
	var written int64
	for err == nil {
		if ctx.Err() != nil {
			return fmt.Errorf("unpack compiled code: %w", context.Cause(ctx))
		}
		var chunk bytes.Buffer
		var n int64
		if n, err = io.CopyN(io.MultiWriter(&chunk, sum), code, 1<<20); err != nil && !errors.Is(err, io.EOF) {
			return refuse(ReasonDamaged, "the code: %v", err)
		}
		if written += n; written > l.code.Size {
			break
		}
		if _, failed := to.Write(chunk.Bytes()); failed != nil {
			return fmt.Errorf("write compiled code: %w", failed)
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); written != l.code.Size || got != l.code.Digest.Encoded() {
		return refuse(ReasonDamaged, "the code has %d bytes or more and the digest %s; %d and %s were signed", written, got, l.code.Size,
			l.code.Digest.Encoded())
	}
	return nil
}

// Reason says why a node does not use a layer. The values are labels of a metric.
type Reason string

// The reasons. Those that Verify and Unpack do not return are the node's.
const (
	ReasonPolicy    Reason = "no_policy" // the node accepts no code from the image's repository
	ReasonKey       Reason = "unknown_key"
	ReasonSignature Reason = "wrong_signature"
	ReasonStatement Reason = "invalid_statement"
	ReasonComponent Reason = "other_component"
	ReasonEngine    Reason = "other_engine"
	ReasonCPU       Reason = "other_cpu"
	ReasonDamaged   Reason = "damaged"
	ReasonWorker    Reason = "worker_refused" // a worker has refused this code before
)

// Refusal is the error of a layer that may not be used. Its class is errdefs.ErrPermissionDenied.
type Refusal struct {
	Reason Reason
	Detail string
}

func (r *Refusal) Error() string { return r.Detail }

func (r *Refusal) Unwrap() error { return errdefs.ErrPermissionDenied }

func refuse(reason Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// signingKey implements dsse.Signer.
type signingKey struct{ ed25519.PrivateKey }

func (k signingKey) Sign(_ context.Context, data []byte) ([]byte, error) {
	return k.PrivateKey.Sign(nil, data, crypto.Hash(0))
}

func (k signingKey) KeyID() (string, error) { return dsse.SHA256KeyID(k.Public()) }
