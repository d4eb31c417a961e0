package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/test/harness"
)

// unruly is a set of registries that misbehave or are unusual, each with its own host name.
type unruly struct {
	dir      string
	upstream *url.URL
	blobs    atomic.Int32 // number of blob requests
}

func newUnruly(t *testing.T) *unruly {
	u := &unruly{dir: filepath.Join(t.TempDir(), "certs.d"), upstream: &url.URL{Scheme: "http", Host: harness.Registry(t).Addr}}
	proxy := httputil.NewSingleHostReverseProxy(u.upstream)
	u.host(t, "locked.test", func(w http.ResponseWriter, r *http.Request) {
		if name, password, ok := r.BasicAuth(); !ok || name != "user" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		r.Header.Del("Authorization")
		proxy.ServeHTTP(w, r)
	})
	u.host(t, "silent.test", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	u.host(t, "stalls.test", func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-r.Context().Done()
			return
		}
		proxy.ServeHTTP(w, r)
	})
	u.host(t, "liar.test", func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			proxy.ServeHTTP(w, r)
			return
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, r)
		body := answer.Body.Bytes()
		for i := range body {
			body[i] ^= 1
		}
		for k, v := range answer.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(answer.Code)
		_, _ = w.Write(body)
	})
	u.host(t, "counted.test", func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			u.blobs.Add(1)
		}
		proxy.ServeHTTP(w, r)
	})
	u.hosts(t, "down.test", "http://127.0.0.1:1")
	return u
}

func (u *unruly) host(t *testing.T, name string, serve http.HandlerFunc) {
	s := httptest.NewServer(serve)
	t.Cleanup(s.Close)
	u.hosts(t, name, s.URL)
}

func (u *unruly) hosts(t *testing.T, name, server string) {
	t.Helper()
	text := fmt.Sprintf("server = %[1]q\n[host.%[1]q]\ncapabilities = [\"pull\", \"resolve\"]\n", server)
	if err := os.MkdirAll(filepath.Join(u.dir, name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(u.dir, name, "hosts.toml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPullFailures(t *testing.T) {
	u := newUnruly(t)
	d := harness.StartDaemon(t, harness.Set("image.hosts_dirs", []string{u.dir, harness.Registry(t).HostsDir}),
		harness.Set("image.pull_progress_timeout", "1s"))
	pull := func(ctx context.Context, name string, auth *runtimeapi.AuthConfig) error {
		_, err := d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec(name), Auth: auth})
		return err
	}
	const path = "/k8s-staging-cri-tools/test-image-1"
	t.Run("public image should timeout if requested [Conformance]", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		wantCode(t, pull(ctx, "silent.test"+path, nil), codes.DeadlineExceeded)
	})
	for name, c := range map[string]struct {
		image string
		want  codes.Code
	}{
		"unknown repository":  {"images.test/no/such/repository:1", codes.NotFound},
		"unknown tag":         {"images.test" + path + ":none", codes.NotFound},
		"unknown digest":      {"images.test" + path + "@sha256:" + strings.Repeat("ab", 32), codes.NotFound},
		"malformed reference": {"images.test/UPPER:1", codes.InvalidArgument},
		"malformed digest":    {"images.test" + path + "@sha256:12", codes.InvalidArgument},
		"no reference":        {"", codes.InvalidArgument},
		"wrong content":       {"liar.test" + path, codes.DataLoss},
		"no login":            {"locked.test" + path, codes.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, pull(context.Background(), c.image, nil), c.want) })
	}
	for name, image := range map[string]string{"a registry that is down": "down.test" + path,
		"a registry that stops sending": "stalls.test" + path} {
		t.Run(name+" has the error that the kubelet knows", func(t *testing.T) {
			_, err := d.Images().PullImage(context.Background(), spec(image), nil, nil)
			// The kubelet compares the beginning of its client's error text.
			text := ""
			if s, ok := status.FromError(err); ok {
				text = s.Message()
			} else if err != nil {
				text = err.Error()
			}
			if !strings.HasPrefix(text, crierrors.ErrRegistryUnavailable.Error()) || !strings.Contains(text, strings.SplitN(image, "/", 2)[0]) {
				t.Errorf("PullImage: got error %v, want %v and the registry's name", err, crierrors.ErrRegistryUnavailable)
			}
		})
	}
	t.Run("logins", func(t *testing.T) {
		good, bad := &runtimeapi.AuthConfig{Username: "user", Password: "secret"}, &runtimeapi.AuthConfig{Username: "user", Password: "guess"}
		wantCode(t, pull(context.Background(), "locked.test"+path, bad), codes.Unauthenticated)
		if err := pull(context.Background(), "locked.test"+path, good); err != nil {
			t.Error(err)
		}
		// An image that one login has pulled is not available to others.
		wantCode(t, pull(context.Background(), "locked.test"+path, nil), codes.Unauthenticated)
		if log := d.DaemonLog(); strings.Contains(log, "secret") || strings.Contains(log, "guess") {
			t.Error("the daemon's log contains a password")
		}
	})
	t.Run("a failed pull leaves no image", func(t *testing.T) {
		for _, host := range []string{"liar.test", "stalls.test", "down.test"} {
			if i := imageOf(t, d, host+path); i != nil {
				t.Errorf("image after the failed pull from %s: got %v, want none", host, i)
			}
		}
	})
	t.Run("I8 many pods want one cold image", func(t *testing.T) {
		var pulls sync.WaitGroup
		for range 50 {
			pulls.Go(func() {
				if err := pull(context.Background(), "counted.test/e2e-test-images/httpd:2.4.39-4", nil); err != nil {
					t.Error(err)
				}
			})
		}
		pulls.Wait()
		if n := u.blobs.Load(); n > 3 { // the configuration and two layers
			t.Errorf("blob requests: got %d, want at most 3", n)
		}
	})
}
