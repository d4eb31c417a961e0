package image

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/image/registry"
)

// mirrorOf serves a store to peers and returns the mirror's URL.
func mirrorOf(t testing.TB, s *Store, change ...func(*MirrorConfig)) string {
	t.Helper()
	cfg := MirrorConfig{Address: "127.0.0.1:0", Transfers: 8,
		Limiter: connlimit.NewGroup(slog.New(slog.DiscardHandler)).Limiter("mirror", connlimit.Config{})}
	for _, c := range change {
		c(&cfg)
	}
	m, err := s.ServeMirror(t.Context(), cfg)
	check(t, err)
	t.Cleanup(func() { check(t, m.Close()) })
	return "http://" + m.Address()
}

// away makes a registry unavailable.
func (r *testRegistry) away() {
	r.setHook(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
}

func TestPeersReplaceARegistryThatIsAway(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "team/app:1", oneFileImage(t, "text"))
	have := pull(t, first, ref)
	_, byDigest, _ := strings.Cut(have.RepoDigests[0], "@")
	byDigest = reg.ref("team/app@" + byDigest)
	mirror := mirrorOf(t, first)
	reg.away()
	for name, c := range map[string]struct {
		ref   string
		peers Peers
		is    func(error) bool // nil: the pull succeeds
	}{
		"digest":                 {byDigest, Peers{Hosts: []string{mirror}}, nil},
		"digest, one peer is up": {byDigest, Peers{Hosts: []string{"http://127.0.0.1:1", "http://no.invalid:1", mirror}}, nil},
		"digest, peers first":    {byDigest, Peers{Hosts: []string{mirror}, First: true}, nil},
		"tag":                    {ref, Peers{Hosts: []string{mirror}, Tags: true}, nil},
		"tag, not allowed":       {ref, Peers{Hosts: []string{mirror}}, errdefs.IsUnavailable},
		"no peer":                {byDigest, Peers{Hosts: []string{"http://127.0.0.1:1"}}, errdefs.IsUnavailable},
		"unknown to peers":       {reg.ref("team/other:1"), Peers{Hosts: []string{mirror}, Tags: true}, errdefs.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, Config{Peers: c.peers})
			img, err := s.Pull(t.Context(), c.ref, PullOptions{})
			if c.is != nil {
				wantError(t, err, c.is)
				return
			}
			check(t, err)
			if img.ID != have.ID {
				t.Errorf("got image %s, want %s", img.ID, have.ID)
			}
		})
	}
}

// A registry that answers decides: what it refuses, no peer provides.
func TestPeersDoNotReplaceARefusal(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	s := open(t, Config{Peers: Peers{Hosts: []string{mirrorOf(t, first)}, Tags: true}})
	for code, is := range map[int]func(error) bool{401: errdefs.IsUnauthorized, 403: errdefs.IsPermissionDenied, 404: errdefs.IsNotFound} {
		reg.setHook(func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(code)
			return true
		})
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		wantError(t, err, is)
	}
}

// With peers first, the registry resolves tags and peers provide the content.
func TestPeersFirst(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	reg.forget()
	s := open(t, Config{Peers: Peers{Hosts: []string{mirrorOf(t, first)}, First: true}})
	pull(t, s, ref)
	if n := reg.count("GET"); n != 0 || reg.count("HEAD", "/manifests/") == 0 {
		t.Errorf("got %d GET requests at the registry, want none, and a request about the tag", n)
	}
	other := reg.push(t, "other:1", oneFileImage(t, "only the registry has this"))
	pull(t, s, other)
}

// Content from a peer is checked like a registry's.
func TestPeerThatLies(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	target, err := url.Parse(mirrorOf(t, first))
	check(t, err)
	var lies atomic.Int32
	liar := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := httptest.NewRecorder()
		out := r.Clone(r.Context())
		out.URL.Scheme, out.URL.Host, out.RequestURI = target.Scheme, target.Host, ""
		resp, err := http.DefaultClient.Do(out)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		_, _ = io.Copy(answer, resp.Body)
		for k, v := range resp.Header {
			w.Header()[k] = v
		}
		w.WriteHeader(resp.StatusCode)
		body := answer.Body.Bytes()
		if len(body) > 0 {
			body[len(body)/2] ^= 1
			lies.Add(1)
		}
		_, _ = w.Write(body)
	}))
	defer liar.Close()
	s := open(t, Config{Peers: Peers{Hosts: []string{liar.URL}, First: true}})
	pull(t, s, ref) // from the registry, after the peer's content was rejected
	if lies.Load() == 0 {
		t.Error("the peer was not asked")
	}
	reg.away()
	s = open(t, Config{Peers: Peers{Hosts: []string{liar.URL}, Tags: true}})
	_, err = s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsDataLoss)
}

func TestMirrorServesOnlyWhatIsAllowed(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	open := reg.push(t, "team/open:1", oneFileImage(t, "public"))
	hidden := reg.push(t, "team/hidden:1", oneFileImage(t, "private"))
	img := pull(t, s, open)
	reg.guard("user", "secret")
	private, err := s.Pull(t.Context(), hidden, PullOptions{Auth: &registry.Auth{Username: "user", Password: "secret"}})
	check(t, err)
	status := func(mirror, path string) int {
		t.Helper()
		resp, err := http.Get(mirror + "/v2/" + path + "?ns=" + reg.host)
		check(t, err)
		defer resp.Body.Close()
		return resp.StatusCode
	}
	config := func(i Image) string { return "/blobs/" + i.ID }
	mirror := mirrorOf(t, s)
	all := mirrorOf(t, s, func(c *MirrorConfig) { c.Private = true })
	none := mirrorOf(t, s, func(c *MirrorConfig) { c.Repositories = []string{reg.host + "/tea"} })
	some := mirrorOf(t, s, func(c *MirrorConfig) { c.Repositories = []string{reg.host + "/team"} })
	for _, c := range []struct {
		mirror, path string
		want         int
	}{
		{mirror, "", 200}, {mirror, "team/open/manifests/1", 200}, {mirror, "team/open/manifests/" + string(img.Manifest), 200},
		{mirror, "team/open" + config(img), 200},
		{mirror, "team/open/blobs/" + string(img.Layers[0].Digest), 200}, {mirror, "team/open/manifests/2", 404},
		{mirror, "team/open/manifests/", 404},
		{mirror, "team/other" + config(img), 404}, {mirror, "team/open" + config(private), 404}, {mirror, "team/hidden/manifests/1", 404},
		{mirror, "team/hidden" + config(private), 404},
		{mirror, "team/open/blobs/../../x", 404}, {mirror, "_catalog", 404},
		{all, "team/hidden/manifests/1", 200}, {all, "team/hidden" + config(private), 200},
		{some, "team/open/manifests/1", 200}, {none, "team/open/manifests/1", 404}, {none, "team/open" + config(img), 404},
	} {
		if got := status(c.mirror, c.path); got != c.want {
			t.Errorf("GET %s: got status %d, want %d", c.path, got, c.want)
		}
	}
	resp, err := http.Post(mirror+"/v2/team/open/blobs/uploads/", "", nil)
	check(t, err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: got status %d, want 405", resp.StatusCode)
	}
	// A pull with a login hides the image, and one without a login shows it again.
	_, err = s.Pull(t.Context(), open, PullOptions{Auth: &registry.Auth{Username: "user", Password: "secret"}})
	check(t, err)
	if got := status(mirror, "team/open/manifests/1"); got != 404 {
		t.Errorf("after a pull with a login: got status %d, want 404", got)
	}
	reg.setHook(nil)
	pull(t, s, open)
	if got := status(mirror, "team/open/manifests/1"); got != 200 {
		t.Errorf("after a pull without a login: got status %d, want 200", got)
	}
}

func TestMirrorRangesAndLimits(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img, disk := largeDisk(t)
	pull(t, s, img.push(t, reg, "disk"))
	mirror := mirrorOf(t, s, func(c *MirrorConfig) { c.Transfers = 1 })
	get := func(header string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			fmt.Sprintf("%s/v2/disk/blobs/%s?ns=%s", mirror, img.manifest.Layers[0].Digest, reg.host), nil)
		check(t, err)
		if header != "" {
			req.Header.Set("Range", header)
		}
		resp, err := http.DefaultClient.Do(req)
		check(t, err)
		return resp
	}
	resp := get("bytes=1000-1999")
	part, err := io.ReadAll(resp.Body)
	check(t, errors.Join(err, resp.Body.Close()))
	if resp.StatusCode != http.StatusPartialContent || !bytes.Equal(part, disk[1000:2000]) {
		t.Errorf("got status %d with %d bytes, want 206 with the range", resp.StatusCode, len(part))
	}
	slow := get("") // its body is not read, so the transfer stays under way
	eventually(t, func() error {
		resp := get("")
		resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
			return fmt.Errorf("a second transfer: got status %d, want 503", resp.StatusCode)
		}
		return nil
	})
	check(t, slow.Body.Close())
	eventually(t, func() error {
		resp := get("bytes=0-0")
		resp.Body.Close()
		if resp.StatusCode != http.StatusPartialContent {
			return fmt.Errorf("after the transfer: got status %d, want 206", resp.StatusCode)
		}
		return nil
	})
}

// Many peers of one mirror get the image, although it limits transfers.
func TestPeersShareALimitedMirror(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	mirror := mirrorOf(t, first, func(c *MirrorConfig) { c.Transfers, c.BytesPerSecond = 2, 1<<20 })
	var wg sync.WaitGroup
	for range 4 {
		s := open(t, Config{Peers: Peers{Hosts: []string{mirror}, First: true}})
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), ref, PullOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// credentials makes an authority and a certificate for loopback, and returns the paths of the authority, the certificate
// and its key.
func credentials(t testing.TB) (ca, cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	check(t, err)
	plain, err := x509.MarshalPKCS8PrivateKey(private)
	check(t, err)
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	check(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	check(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: plain}), 0o600))
	return cert, cert, key
}

// A mirror with a client CA serves only peers with a certificate, and peers believe only mirrors of their authority.
func TestPeersWithTLS(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	ca, cert, key := credentials(t)
	otherCA, otherCert, otherKey := credentials(t)
	mirror := strings.Replace(mirrorOf(t, first, func(c *MirrorConfig) { c.Certificate, c.Key, c.ClientCA = cert, key, ca }), "http:",
		"https:", 1)
	reg.away()
	for name, c := range map[string]struct {
		peers Peers
		ok    bool
	}{
		"certificate":             {Peers{CA: ca, Certificate: cert, Key: key}, true},
		"no certificate":          {Peers{CA: ca}, false},
		"foreign certificate":     {Peers{CA: ca, Certificate: otherCert, Key: otherKey}, false},
		"foreign authority":       {Peers{CA: otherCA, Certificate: cert, Key: key}, false},
		"authorities of the node": {Peers{Certificate: cert, Key: key}, false},
	} {
		c.peers.Hosts, c.peers.Tags = []string{mirror}, true
		_, err := open(t, Config{Peers: c.peers}).Pull(t.Context(), ref, PullOptions{})
		if c.ok != (err == nil) || err != nil && !errdefs.IsUnavailable(err) {
			t.Errorf("%s: got error %v, want success %v", name, err, c.ok)
		}
	}
}

func TestPeersConfiguration(t *testing.T) {
	for _, peers := range []Peers{{Hosts: []string{"10.0.0.1:5000"}}, {Hosts: []string{"https://peer.example"}},
		{Hosts: []string{"ftp://peer.example:1"}}} {
		_, err := Open(t.Context(), Config{Root: t.TempDir(), Peers: peers})
		wantError(t, err, errdefs.IsInvalidArgument, peers.Hosts[0])
	}
	for _, peers := range []Peers{{CA: "/does/not/exist"}, {Certificate: "/does/not/exist", Key: "/does/not/exist"}} {
		_, err := Open(t.Context(), Config{Root: t.TempDir(), Peers: peers})
		wantError(t, err, errdefs.IsFailedPrecondition, "/does/not/exist")
	}
}

// A node goes on serving a public image that it pulls again, from a peer, while the registry is away.
func TestPublicImageStaysPublic(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	pull(t, first, ref)
	s := open(t, Config{Peers: Peers{Hosts: []string{mirrorOf(t, first)}, Tags: true}})
	pull(t, s, ref)
	reg.away()
	pull(t, s, ref)
	resp, err := http.Get(mirrorOf(t, s) + "/v2/app/manifests/1?ns=" + reg.host)
	check(t, err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("got status %d, want that the image is served", resp.StatusCode)
	}
}

// If no source has a blob, the registry's answer decides what the caller learns, although peers were asked first.
func TestPeersFirstAndTheRegistryFails(t *testing.T) {
	reg, first := newRegistry(t), open(t, Config{})
	pull(t, first, reg.push(t, "other:1", oneFileImage(t, "other")))
	ref := reg.push(t, "app:1", oneFileImage(t, "text"))
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return r.Method == http.MethodGet && r.URL.Path != "/v2/"
	})
	_, err := open(t, Config{Peers: Peers{Hosts: []string{mirrorOf(t, first)}, First: true}}).Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnavailable)
}
