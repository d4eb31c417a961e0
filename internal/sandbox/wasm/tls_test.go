package wasm

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/certificates"
)

// verify verifies a chain by an authority for a name or an address, and returns the leaf.
func verify(t *testing.T, ca, chain []byte, host string) *x509.Certificate {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		t.Fatal("no certificate in the authority's PEM")
	}
	block, _ := pem.Decode(chain)
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host}); err != nil {
		t.Errorf("Verify for %s = %v", host, err)
	}
	return leaf
}

// TestAuthority checks that certificates are valid for the pod's names and addresses, and that the authority is reused,
// and replaced if one of its files is missing.
func TestAuthority(t *testing.T) {
	dir := t.TempDir()
	issue := func() []byte {
		chain, key, renewAt, err := certificates.NewAuthority(dir).Issue(t.Context(),
			[]netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::7")}, []string{"greeter", "localhost"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tls.X509KeyPair(chain, key); err != nil {
			t.Error(err)
		}
		if in := time.Until(renewAt); in < 19*24*time.Hour || in > certificates.Life {
			t.Errorf("time until renewal = %s, want about two thirds of %s", in, certificates.Life)
		}
		return chain
	}
	chain := issue()
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"greeter", "localhost", "10.1.2.3", "fd00::7"} {
		verify(t, ca, chain, host)
	}
	if info, err := os.Stat(filepath.Join(dir, "ca.key")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the key file = %v, %v; want 0600", info.Mode(), err)
	}
	verify(t, ca, issue(), "greeter") // issued by the same authority
	if err := os.Remove(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	chain = issue()
	if ca, err = os.ReadFile(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	verify(t, ca, chain, "greeter")
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := certificates.NewAuthority(dir).Issue(t.Context(), nil, []string{"x"}); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "remove both") {
		t.Errorf("issue with a damaged authority = %v, want ErrFailedPrecondition", err)
	}
}

// secret writes a Secret's directory like a kubelet: the files are links to a version.
func secret(t *testing.T, dir, version string, files map[string][]byte) {
	t.Helper()
	at := filepath.Join(dir, version)
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(at, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Symlink(version, filepath.Join(dir, "..tmp")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
}

// identities returns the files of a certificate for name, issued by a new authority.
func identities(t *testing.T, name string) map[string][]byte {
	t.Helper()
	a := certificates.NewAuthority(t.TempDir())
	chain, key, _, err := a.Issue(t.Context(), nil, []string{name})
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(a.CertFile())
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{certFile: chain, keyFile: key, clientCAFile: ca}
}

// TestMountedCertificate checks that a pod uses the current certificate of its mount.
func TestMountedCertificate(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	first, second := identities(t, "first"), identities(t, "second")
	secret(t, dir, "1", first)
	p := r.pod("p", func(c *runtimeapi.PodSandboxConfig) { c.Annotations["vimana.host/tls"] = "/tls" })
	c := r.container(p, "world=grpc")
	c.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/tls", HostPath: dir, Readonly: true}}
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	r.must(r.StartContainer(r.ctx(), p, c))
	served := func() string { return r.metrics(r.ctx())[0].Methods[0].Procedure } // the fake worker reports the certificate here
	if served() != string(first[certFile]) {
		t.Error("the pod does not use the certificate of its mount")
	}
	secret(t, dir, "2", second)
	r.eventually("the new certificate is served", func() bool { return served() == string(second[certFile]) })
	r.restartDaemon()
	secret(t, dir, "3", map[string][]byte{certFile: []byte("junk"), keyFile: []byte("junk")})
	secret(t, dir, "4", first)
	r.eventually("the next certificate is served after an invalid one and a restart of the daemon",
		func() bool { return served() == string(first[certFile]) })
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	secret(t, dir, "5", map[string][]byte{certFile: []byte("junk"), keyFile: []byte("junk")})
	if err := r.StartContainer(r.ctx(), p, c); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), certFile) {
		t.Errorf("StartContainer with an invalid certificate = %v, want ErrInvalidArgument for %s", err, certFile)
	}
}

// TestGeneratedCertificate checks that a generated certificate is renewed before it expires, even after a restart of
// the daemon.
func TestGeneratedCertificate(t *testing.T) {
	r := newRig(t)
	p := r.podConfig("p")
	p.IPs = []netip.Addr{netip.MustParseAddr("10.1.2.3")}
	r.known[p.ID] = sandbox.Known{Pod: p}
	r.must(r.CreateSandbox(r.ctx(), p))
	c := r.create(p, "world=grpc")
	r.must(r.StartContainer(r.ctx(), p, c))
	served := func() string { return r.metrics(r.ctx())[0].Methods[0].Procedure }
	ca, err := os.ReadFile(filepath.Join(r.config.Root, "ca.crt"))
	r.must(err)
	first := served()
	for _, host := range []string{"p", "p.test", "greeter", "registry.example", "127.0.0.1", "10.1.2.3"} {
		verify(t, ca, []byte(first), host)
	}
	r.restartDaemon()
	r.renewDue(r.ctx(), time.Now().Add(certificates.Life/2))
	if served() != first {
		t.Error("the certificate was renewed too early")
	}
	r.renewDue(r.ctx(), time.Now().Add(certificates.Life*3/4))
	if served() == first {
		t.Error("the certificate was not renewed")
	}
}

// TestMountedIdentityIsContained checks that links in a mount cannot make the daemon read files outside of the mount.
func TestMountedIdentityIsContained(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	for name, content := range identities(t, "x") {
		if err := os.WriteFile(filepath.Join(outside, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(outside, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := mountedIdentity(dir, false); !errdefs.IsInvalidArgument(err) {
		t.Errorf("mountedIdentity through links out of the mount = %v, want ErrInvalidArgument", err)
	}
	if _, err := mountedIdentity(outside, true); err != nil {
		t.Error(err)
	}
}
