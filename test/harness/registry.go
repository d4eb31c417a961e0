package harness

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/tripod-run/tripod/test/harness/registry"
)

// Images that hack/images builds. The daemon pulls them through a mirror, whatever their registry.
const (
	Busybox     = "registry.k8s.io/e2e-test-images/busybox:1.29-2"
	Nginx       = "registry.k8s.io/e2e-test-images/nginx:1.14-2"          // serves port 80
	HostNginx   = "images.test/k8s-staging-cri-tools/hostnet-nginx-amd64" // serves port 12003
	Httpd       = "registry.k8s.io/e2e-test-images/httpd:2.4.39-4"        // serves port 80
	NoNewPrivs  = "registry.k8s.io/e2e-test-images/nonewprivs:1.3"
	Pause       = "registry.k8s.io/pause:3.10"
	Config      = "images.test/tripod/config:1"     // has every field of an image configuration
	StopSignal  = "images.test/tripod/stopsignal:1" // exits with 7 on its stop signal, USR1, and with 15 on TERM
	Index       = "images.test/tripod/index:1"      // for several platforms; /platform names the platform
	Bare        = "images.test/tripod/bare:1"       // a manifest without an index
	Layers      = "images.test/tripod/layers:1"     // whiteouts, opaque directories, links: /layers
	Symlinks    = "images.test/tripod/symlinks:1"   // its /etc/passwd, /data and /work are links out of the image
	HostileIDs  = "images.test/tripod/users:1"      // 32 MiB of /etc/group; users named 1000, big and negative
	ImagePrefix = "images.test/"
)

// RegistryServer is the registry of a test binary.
type RegistryServer struct {
	// Addr is HOST:PORT on loopback.
	Addr string
	// HostsDir is a directory with a hosts.toml that makes Addr the mirror of every registry.
	HostsDir string

	server *registry.Server
}

var theRegistry struct {
	sync.Mutex
	*RegistryServer
}

// Registry starts docker-registry with all images, once per test binary. Tests may push to it.
func Registry(t testing.TB) *RegistryServer {
	t.Helper()
	r, err := OpenRegistry()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// OpenRegistry is like Registry, for callers without a test.
func OpenRegistry() (*RegistryServer, error) {
	theRegistry.Lock()
	defer theRegistry.Unlock()
	if theRegistry.RegistryServer == nil {
		r, err := startRegistry()
		if err != nil {
			return nil, err
		}
		theRegistry.RegistryServer = r
	}
	return theRegistry.RegistryServer, nil
}

func startRegistry() (*RegistryServer, error) {
	storage := filepath.Join(Dir(), "registry")
	if err := os.CopyFS(storage, os.DirFS(filepath.Join(Root(), "build", "images", "registry"))); err != nil {
		return nil, err
	}
	s, err := registry.Start(context.Background(), storage, "0.0.0.0:0")
	if err != nil {
		return nil, err
	}
	r := &RegistryServer{HostsDir: filepath.Join(Dir(), "certs.d"), server: s}
	r.Addr = r.at("127.0.0.1")
	return r, r.WriteHosts(r.HostsDir, "127.0.0.1")
}

func (r *RegistryServer) at(ip string) string {
	_, port, _ := net.SplitHostPort(r.server.Addr)
	return net.JoinHostPort(ip, port)
}

// WriteHosts writes a directory with a hosts.toml that makes the registry, at one of the world's addresses, the mirror
// of every registry.
func (r *RegistryServer) WriteHosts(dir, ip string) error { return registry.WriteHosts(dir, r.at(ip)) }

// CloseRegistry stops the registry. Main and Enter call it.
func CloseRegistry() {
	theRegistry.Lock()
	defer theRegistry.Unlock()
	if theRegistry.RegistryServer != nil {
		_ = theRegistry.server.Stop()
	}
}
