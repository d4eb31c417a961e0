package codelayer

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/stretchr/testify/require"
)

var code = bytes.Repeat([]byte("machine code "), 100_000)

func testTarget() Target {
	return Target{Component: digest.FromString("component"), Engine: "wasmtime-1+1-linux-amd64", Features: []string{"avx", "sse3"}}
}

// newKey returns the key whose seed consists of one byte.
func newKey(t testing.TB, seed byte) (ed25519.PrivateKey, PublicKey) {
	t.Helper()
	private := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	public, err := newPublicKey(private.Public().(ed25519.PublicKey))
	require.NoError(t, err)
	return private, public
}

func TestPackedCodeIsAccepted(t *testing.T) {
	private, public := newKey(t, 1)
	_, other := newKey(t, 2)
	layer, envelope, err := Pack(t.Context(), private, testTarget(), code)
	require.NoError(t, err)
	require.Less(t, len(layer), len(code)/10, "the code is compressed")
	node := testTarget()
	node.Features = append(node.Features, "avx2") // a node may have more
	accepted, err := Verify(t.Context(), envelope, digest.FromBytes(layer), []PublicKey{other, public}, node)
	require.NoError(t, err)
	require.Equal(t, public.Fingerprint, accepted.Key)
	var out bytes.Buffer
	require.NoError(t, accepted.Unpack(t.Context(), bytes.NewReader(layer), &out))
	require.True(t, bytes.Equal(code, out.Bytes()))
	again, same, err := Pack(t.Context(), private, testTarget(), code)
	require.NoError(t, err)
	require.True(t, bytes.Equal(layer, again) && bytes.Equal(envelope, same), "the same code makes the same layers")
}

func TestPackRefusesCodeWithoutBytes(t *testing.T) {
	private, _ := newKey(t, 1)
	_, _, err := Pack(t.Context(), private, testTarget(), nil)
	require.True(t, errdefs.IsInvalidArgument(err), err)
}

// TestRefusedLayers checks each reason not to use a layer.
func TestRefusedLayers(t *testing.T) {
	private, public := newKey(t, 1)
	_, other := newKey(t, 2)
	layer, envelope, err := Pack(t.Context(), private, testTarget(), code)
	require.NoError(t, err)
	// resigned returns an envelope of the trusted key whose statement has been changed.
	resigned := func(change func(*statement)) []byte {
		payload, _, err := open(t.Context(), envelope, []PublicKey{public})
		require.NoError(t, err)
		var s statement
		require.NoError(t, json.Unmarshal(payload, &s))
		change(&s)
		return signed(t, private, payloadType, s)
	}
	for name, c := range map[string]struct {
		envelope []byte
		layer    digest.Digest
		keys     []PublicKey
		node     func(*Target)
		want     Reason
	}{
		"no key":      {keys: []PublicKey{}, want: ReasonKey},
		"unknown key": {keys: []PublicKey{other}, want: ReasonKey},
		"wrong signature": {envelope: forged(t, envelope, func(e *dsse.Envelope) { e.Signatures[0].Sig = "AAAA" + e.Signatures[0].Sig[4:] }),
			want: ReasonSignature},
		"changed statement": {envelope: forged(t, envelope, func(e *dsse.Envelope) {
			e.Payload = "e30=" + e.Payload[4:]
		}), want: ReasonSignature},
		"key without a name": {envelope: forged(t, envelope, func(e *dsse.Envelope) { e.Signatures[0].KeyID = "" }), keys: []PublicKey{other},
			want: ReasonSignature},
		"name of another key": {envelope: forged(t, envelope, func(e *dsse.Envelope) { e.Signatures[0].KeyID = other.Fingerprint }),
			keys: []PublicKey{other, public}, want: ReasonSignature},
		"other layer":     {layer: digest.FromString("another layer"), want: ReasonDamaged},
		"other component": {node: func(n *Target) { n.Component = digest.FromString("swapped") }, want: ReasonComponent},
		"other engine":    {node: func(n *Target) { n.Engine = "wasmtime-2+1-linux-amd64" }, want: ReasonEngine},
		"other settings":  {node: func(n *Target) { n.Engine = "wasmtime-1+2-linux-amd64" }, want: ReasonEngine},
		"processor":       {node: func(n *Target) { n.Features = []string{"sse3"} }, want: ReasonCPU},
		"no JSON":         {envelope: []byte("{"), want: ReasonStatement},
		"empty":           {envelope: []byte("{}"), want: ReasonStatement},
		"null":            {envelope: []byte("null"), want: ReasonStatement},
		"large":           {envelope: bytes.Repeat([]byte(" "), MaxEnvelope+1), want: ReasonStatement},
		"many signatures": {envelope: forged(t, envelope, func(e *dsse.Envelope) { e.Signatures = make([]dsse.Signature, 17) }),
			want: ReasonStatement},
		"other payload": {envelope: signed(t, private, "text/plain", statement{}), want: ReasonStatement},
		"other statement": {envelope: signed(t, private, payloadType, map[string]string{"_type": "https://in-toto.io/Statement/v0.1"}),
			want: ReasonStatement},
		"statement no object": {envelope: signed(t, private, payloadType, []int{1}), want: ReasonStatement},
		"other predicate": {envelope: resigned(func(s *statement) { s.PredicateType = "https://slsa.dev/provenance/v1" }),
			want: ReasonStatement},
		"no subject":    {envelope: resigned(func(s *statement) { s.Subject = nil }), want: ReasonStatement},
		"two subjects":  {envelope: resigned(func(s *statement) { s.Subject = append(s.Subject, s.Subject[0]) }), want: ReasonStatement},
		"no features":   {envelope: resigned(func(s *statement) { s.Predicate.Features = nil }), want: ReasonStatement},
		"no engine":     {envelope: resigned(func(s *statement) { s.Predicate.Engine = "" }), want: ReasonStatement},
		"no size":       {envelope: resigned(func(s *statement) { s.Predicate.Code.Size = 0 }), want: ReasonStatement},
		"too much code": {envelope: resigned(func(s *statement) { s.Predicate.Code.Size = MaxCode + 1 }), want: ReasonStatement},
		"no digest":     {envelope: resigned(func(s *statement) { s.Predicate.Component = "" }), want: ReasonStatement},
		"weak digest":   {envelope: resigned(func(s *statement) { s.Predicate.Code.Digest = "md5:00" }), want: ReasonStatement},
		"subject by sha512": {envelope: resigned(func(s *statement) { s.Subject[0].Digest = map[string]string{"sha512": "00"} }),
			want: ReasonDamaged},
	} {
		t.Run(name, func(t *testing.T) {
			node := testTarget()
			if c.node != nil {
				c.node(&node)
			}
			if c.envelope == nil {
				c.envelope = envelope
			}
			if c.layer == "" {
				c.layer = digest.FromBytes(layer)
			}
			if c.keys == nil {
				c.keys = []PublicKey{public}
			}
			got, err := Verify(t.Context(), c.envelope, c.layer, c.keys, node)
			require.Nil(t, got)
			requireReason(t, c.want, err)
		})
	}
}

func requireReason(t testing.TB, want Reason, err error) {
	t.Helper()
	refusal, ok := errors.AsType[*Refusal](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, want, refusal.Reason, err.Error())
	require.True(t, errdefs.IsPermissionDenied(err))
}

// forged returns an envelope that was changed after it was signed.
func forged(t testing.TB, envelope []byte, change func(*dsse.Envelope)) []byte {
	t.Helper()
	var e dsse.Envelope
	require.NoError(t, json.Unmarshal(envelope, &e))
	change(&e)
	out, err := json.Marshal(e)
	require.NoError(t, err)
	return out
}

// signed returns an envelope about any document.
func signed(t testing.TB, key ed25519.PrivateKey, kind string, document any) []byte {
	t.Helper()
	payload, err := json.Marshal(document)
	require.NoError(t, err)
	signer, err := dsse.NewEnvelopeSigner(signingKey{key})
	require.NoError(t, err)
	e, err := signer.SignPayload(context.Background(), kind, payload)
	require.NoError(t, err)
	out, err := json.Marshal(e)
	require.NoError(t, err)
	return out
}

// TestUnsignedContentIsRefused checks that a layer whose content is not what was signed is refused, without writing more
// than was signed. The signed digest of the layer normally prevents such layers.
func TestUnsignedContentIsRefused(t *testing.T) {
	l := &Layer{code: content{Digest: digest.FromBytes(code), Size: int64(len(code))}}
	encoder, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	whole := encoder.EncodeAll(code, nil)
	changed := bytes.Clone(code)
	changed[len(changed)/2]++
	for name, layer := range map[string][]byte{
		"truncated":      whole[:len(whole)/2],
		"empty":          {},
		"not zstd":       code,
		"shorter":        encoder.EncodeAll(code[:len(code)-1], nil),
		"changed":        encoder.EncodeAll(changed, nil),
		"longer":         encoder.EncodeAll(append(bytes.Clone(code), 0), nil),
		"a bomb":         encoder.EncodeAll(make([]byte, 64<<20), nil),
		"followed by it": append(bytes.Clone(whole), whole...),
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			requireReason(t, ReasonDamaged, l.Unpack(t.Context(), bytes.NewReader(layer), &out))
			require.LessOrEqual(t, out.Len(), len(code))
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, l.Unpack(ctx, bytes.NewReader(whole), &bytes.Buffer{}), context.Canceled)
}

// TestKeysOfOpenSSL checks that keys made by the documented commands can be used, and that others are refused.
func TestKeysOfOpenSSL(t *testing.T) {
	dir := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "openssl", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	run("genpkey", "-algorithm", "ed25519", "-out", file("key"))
	run("pkey", "-in", file("key"), "-pubout", "-out", file("pub"))
	run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", file("ec"))
	run("pkey", "-in", file("ec"), "-pubout", "-out", file("ecpub"))
	run("pkey", "-in", file("key"), "-aes256", "-passout", "pass:secret", "-out", file("encrypted"))
	private, err := ReadPrivateKey(file("key"))
	require.NoError(t, err)
	public, err := ReadPublicKey(file("pub"))
	require.NoError(t, err)
	require.Equal(t, ed25519.PublicKey(public.key), private.Public())
	require.True(t, strings.HasPrefix(public.Fingerprint, "SHA256:"), public.Fingerprint)
	require.NoError(t, os.WriteFile(file("text"), []byte("no key"), 0o600))
	for _, name := range []string{"key", "ec", "ecpub", "text"} {
		_, err := ReadPublicKey(file(name))
		require.True(t, errdefs.IsInvalidArgument(err), "%s: %v", name, err)
	}
	for _, name := range []string{"pub", "ec", "ecpub", "text", "encrypted"} {
		_, err := ReadPrivateKey(file(name))
		require.True(t, errdefs.IsInvalidArgument(err), "%s: %v", name, err)
	}
	_, err = ReadPublicKey(file("none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = ReadPrivateKey(file("none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// FuzzStatement checks that no envelope and no statement harms the reader, and that what is accepted is complete.
func FuzzStatement(f *testing.F) {
	private, public := newKey(f, 1)
	layer, envelope, err := Pack(f.Context(), private, testTarget(), code)
	require.NoError(f, err)
	payload, _, err := open(f.Context(), envelope, []PublicKey{public})
	require.NoError(f, err)
	f.Add(envelope)
	f.Add(payload)
	f.Add([]byte(`{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"sig":"AA=="}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if accepted, err := Verify(t.Context(), data, digest.FromBytes(layer), []PublicKey{public}, testTarget()); err == nil {
			if accepted.code.Size != int64(len(code)) || accepted.code.Digest != digest.FromBytes(code) {
				t.Errorf("Verify accepted other code: %+v", accepted)
			}
		} else if _, ok := errors.AsType[*Refusal](err); !ok {
			t.Errorf("Verify = %v, want a refusal", err)
		}
		if s, err := parseStatement(data); err == nil &&
			(len(s.Subject) != 1 || s.Predicate.Code.Size <= 0 || s.Predicate.Code.Size > MaxCode || s.Predicate.Engine == "") {
			t.Errorf("parseStatement accepted %+v", s)
		}
	})
}

func TestHostFeatures(t *testing.T) {
	features := HostFeatures()
	require.NotNil(t, features) // an empty list must be encoded as one
	for _, f := range features {
		cpuinfo, err := os.ReadFile("/proc/cpuinfo")
		require.NoError(t, err)
		name := map[string]string{"sse3": "pni", "lzcnt": "abm"}[f]
		if name == "" {
			name = f
		}
		require.Contains(t, strings.Fields(string(cpuinfo)), name)
	}
}
