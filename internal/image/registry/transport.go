package registry

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// registryTransport evens out what registries answer to requests for manifests, before containerd reads the answer.
//
//   - A HEAD that fails in another way than 401, 404 and 429 is repeated as GET: the signature in a URL to which a registry
//     redirects is often for GET only.
//   - A manifest without a useful Content-Type, as static files have it, gets that of its own mediaType, or of its shape.
//   - An answer that is no document at all, such as a page of a proxy, is an error, so that the next host is asked.
//   - A manifest that could not be asked for is not "not found" because there is no blob with its digest, which is what containerd
//     asks for next.
//
// Several challenges in one header become several headers, because containerd reads the first one only.
//
// It also notes which host serves a blob, and no longer asks a mirror that was passed over. An upload that the registry sends
// to another host, or to one without TLS, has no headers that are meant for the registry.
type registryTransport struct {
	base   http.RoundTripper
	host   string // as configured
	mirror bool   // another host follows
	used   *Hosts
}

// RoundTrip implements http.RoundTripper.
func (t registryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.mirror && t.used.isPassedOver(t.host) {
		return nil, fmt.Errorf("mirror %s was passed over, because it sent wrong content: %w", t.host, errdefs.ErrUnavailable)
	}
	if req.URL.Host != t.host || t.used.isPlain(t.host, req.URL) {
		req = req.Clone(req.Context())
		keepPublic(req.Header)
	}
	resp, err := t.base.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusUnauthorized {
		resp.Header["Www-Authenticate"] = challenges(resp.Header["Www-Authenticate"])
	}
	if err == nil && req.Method == http.MethodPost {
		return t.checkUpload(resp)
	}
	if err == nil && resp.StatusCode < http.StatusBadRequest && isFor(req, "blobs") {
		t.used.note(digest.Digest(path.Base(req.URL.Path)), t.host, t.mirror)
	}
	if req.Method == http.MethodHead && err == nil && resp.StatusCode == http.StatusNotFound && isFor(req, "blobs") {
		if lost := t.used.lost(req, t.host); lost != nil {
			resp.Body.Close()
			return nil, lost
		}
	}
	if !forManifest(req) {
		return resp, err
	}
	if t.used.lose(req, t.host, err); err != nil {
		return nil, err
	}
	if req.Method == http.MethodHead && repeatAsGet(resp) {
		again, err := t.base.RoundTrip(asGet(req))
		if err != nil {
			return resp, nil //nolint:nilerr // the first answer says as much
		}
		resp.Body.Close()
		resp = again
	}
	if resp.StatusCode != http.StatusOK || typeKnown(resp) {
		return resp, nil
	}
	return t.named(req, resp)
}

// Hosts is what one transfer has learned about the hosts that serve it.
type Hosts struct {
	logins *logins
	refuse bool // Config.RefuseDowngrades

	mu     sync.Mutex
	served map[digest.Digest]string // the mirrors that serve blobs
	passed map[string]bool          // mirrors that sent wrong content
	failed map[[2]string]error      // by host and reference, the requests for manifests that had no answer
	plain  map[[2]string]bool       // registries with TLS, and the hosts without TLS that they refer to
}

// SentLogin reports whether a host has received a login so far.
func (u *Hosts) SentLogin() bool { return u.logins.used.Load() }

// note notes the host that serves a blob.
func (u *Hosts) note(blob digest.Digest, host string, mirror bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if mirror {
		u.served[blob] = host
	} else {
		delete(u.served, blob)
	}
}

func (u *Hosts) isPassedOver(mirror string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.passed[mirror]
}

// PassOver is called if the content of a blob is wrong. If a mirror sent it, that mirror is asked no more, and passOver returns
// its name, otherwise "".
func (u *Hosts) PassOver(blob digest.Digest) string {
	u.mu.Lock()
	defer u.mu.Unlock()
	mirror := u.served[blob]
	if mirror != "" {
		u.passed[mirror] = true
		delete(u.served, blob) // other blobs of this mirror can be under way
	}
	return mirror
}

// lose notes whether a request for a manifest had an answer.
func (u *Hosts) lose(req *http.Request, host string, err error) {
	key := [2]string{host, path.Base(original(req).URL.Path)}
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil {
		u.failed[key] = err
	} else {
		delete(u.failed, key)
	}
}

// lost returns why a host did not answer when it was asked for the manifest with the digest of a blob; nil if it did.
func (u *Hosts) lost(req *http.Request, host string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.failed[[2]string{host, path.Base(req.URL.Path)}]
}

// original returns the request that was redirected to a request, or the request itself.
func original(req *http.Request) *http.Request {
	for req.Response != nil && req.Response.Request != nil {
		req = req.Response.Request
	}
	return req
}

// forManifest reports whether a request, or the first of the redirected ones before it, is for a manifest.
func forManifest(req *http.Request) bool {
	req = original(req)
	return (req.Method == http.MethodHead || req.Method == http.MethodGet) && isFor(req, "manifests")
}

// isFor reports whether a request is for something of a kind in the distribution API: …/KIND/REFERENCE.
func isFor(req *http.Request, kind string) bool { return path.Base(path.Dir(req.URL.Path)) == kind }

// repeatAsGet reports whether only a GET can tell more than this answer to a HEAD.
func repeatAsGet(resp *http.Response) bool {
	switch {
	case resp.StatusCode == http.StatusUnauthorized, resp.StatusCode == http.StatusNotFound, resp.StatusCode == http.StatusTooManyRequests:
		return false
	case resp.StatusCode >= http.StatusBadRequest:
		return true
	}
	return resp.StatusCode == http.StatusOK && !typeKnown(resp)
}

func asGet(req *http.Request) *http.Request {
	get := req.Clone(req.Context())
	get.Method = http.MethodGet
	return get
}

// typeKnown reports whether an answer's Content-Type is that of a manifest or an index.
func typeKnown(resp *http.Response) bool {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return err == nil && (images.IsManifestType(kind) || images.IsIndexType(kind) || kind == images.MediaTypeDockerSchema1Manifest ||
		kind == "application/vnd.docker.distribution.manifest.v1+json")
}

// named gives a manifest the type that its document says. The body has been read, and can be read again.
func (t registryTransport) named(req *http.Request, resp *http.Response) (*http.Response, error) {
	document, err := io.ReadAll(io.LimitReader(resp.Body, MaxDocumentBytes+1))
	resp.Body.Close()
	if err != nil {
		return nil, fmt.Errorf("read a manifest of %s: %w", req.URL.Host, err)
	}
	given := resp.Header.Get("Content-Type")
	if len(document) > MaxDocumentBytes {
		return nil, fmt.Errorf("%s answered with more than %d bytes of the type %q: %w", req.URL.Host, MaxDocumentBytes, given,
			errdefs.ErrInvalidArgument)
	}
	kind := documentType(document)
	if kind == "" {
		return nil, fmt.Errorf("%s answered with something of the type %q that is no manifest: %w", req.URL.Host, given,
			errdefs.ErrInvalidArgument)
	}
	resp.Header = resp.Header.Clone()
	resp.Header.Set("Content-Type", kind)
	resp.Header.Set("Content-Length", strconv.Itoa(len(document)))
	resp.ContentLength = int64(len(document))
	resp.Body = io.NopCloser(bytes.NewReader(document))
	if req.Method == http.MethodHead {
		resp.Body = http.NoBody
	}
	return resp, nil
}

// documentType returns the type of a manifest or an index by its mediaType, which must fit its shape, or else by its shape; ""
// if it is neither.
func documentType(document []byte) string {
	var d struct {
		MediaType     string          `json:"mediaType"`
		SchemaVersion int             `json:"schemaVersion"`
		Config        json.RawMessage `json:"config"`
		Layers        json.RawMessage `json:"layers"`
		Manifests     json.RawMessage `json:"manifests"`
		FSLayers      json.RawMessage `json:"fsLayers"`
	}
	if json.Unmarshal(document, &d) != nil {
		return ""
	}
	switch manifest, index := len(d.Config) > 0 && len(d.Layers) > 0, len(d.Manifests) > 0; {
	case manifest && !index && (d.MediaType == "" || images.IsManifestType(d.MediaType)):
		return cmp.Or(d.MediaType, ocispec.MediaTypeImageManifest)
	case index && !manifest && (d.MediaType == "" || images.IsIndexType(d.MediaType)):
		return cmp.Or(d.MediaType, ocispec.MediaTypeImageIndex)
	case len(d.FSLayers) > 0 && d.SchemaVersion == 1:
		return images.MediaTypeDockerSchema1Manifest
	}
	return ""
}

// beginsChallenge matches what follows a comma in a WWW-Authenticate header if it is another challenge, and not a parameter.
var beginsChallenge = lazyregexp.New(`^\s*[!#$%&'*+.^_|~0-9A-Za-z-]+(\s+[^\s=]|\s*(,|$))`)

// challenges separates the challenges in WWW-Authenticate headers (RFC 9110, 11.6.1).
func challenges(headers []string) (all []string) {
	for _, header := range headers {
		begin, quoted := 0, false
		for i := 0; i < len(header); i++ {
			switch c := header[i]; {
			case quoted && c == '\\':
				i++
			case c == '"':
				quoted = !quoted
			case c == ',' && !quoted && beginsChallenge().MatchString(header[i+1:]):
				all = append(all, strings.TrimSpace(header[begin:i]))
				begin = i + 1
			}
		}
		all = append(all, strings.TrimSpace(header[begin:]))
	}
	return all
}
