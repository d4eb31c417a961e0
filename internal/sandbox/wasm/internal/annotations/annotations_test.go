package annotations

import (
	"cmp"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestParse(t *testing.T) {
	for name, c := range map[string]struct {
		given map[string]string
		want  Options
	}{
		"nothing said": {nil, Options{Port: 443, Cleartext: 80, TLS: TLSGenerated}},
		"all said": {
			map[string]string{"port": "8443", "cleartext-port": "8080", "concurrency": "7", "request-timeout": "2s", "max-message-bytes": "1024",
				"reuse": "true", "reuse-requests": "5", "reuse-age": "1m", "snapshot": "always", "code": "quick",
				"cors-origins": "https://app.example, https://*.example.com", "cors-credentials": "true"},
			Options{Port: 8443, Cleartext: 8080, TLS: TLSGenerated, Limits: workerapi.Limits{
				Concurrency: 7, RequestTimeout: 2 * time.Second, MaxMessageBytes: 1024, Reuse: true, ReuseRequests: 5, ReuseAge: time.Minute,
				Snapshot: workerapi.SnapshotAlways,
			}, Code: code.ModeQuick, CORS: workerapi.CORS{Origins: []string{"https://app.example", "https://*.example.com"}, Credentials: true}},
		},
		"no TLS":        {map[string]string{"tls": "off"}, Options{Cleartext: 80, TLS: TLSOff}},
		"no cleartext":  {map[string]string{"cleartext-port": "off"}, Options{Port: 443, TLS: TLSGenerated}},
		"clients named": {map[string]string{"tls": "/tls/", "client-auth": "require"}, Options{Port: 443, TLS: "/tls", RequireClient: true}},
		"clients and plain": {map[string]string{"tls": "/tls", "client-auth": "require", "cleartext-port": "81"},
			Options{Port: 443, Cleartext: 81, TLS: "/tls", RequireClient: true}},
		"no pages": {map[string]string{"cors-origins": "off"},
			Options{Port: 443, Cleartext: 80, TLS: TLSGenerated, CORS: workerapi.CORS{Origins: []string{}}}},
		"others' keys": {map[string]string{"something": "else"}, Options{Port: 443, Cleartext: 80, TLS: TLSGenerated}},
	} {
		all := map[string]string{}
		for k, v := range c.given {
			all["vimana.host/"+k] = v
		}
		got, err := Parse(&runtimeapi.PodSandboxConfig{Annotations: all}, "c", "vimana.host/")
		c.want.Code = cmp.Or(c.want.Code, code.ModeAuto)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: Parse = %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	label := &runtimeapi.PodSandboxConfig{Labels: map[string]string{"p/port": "9"}}
	if got, err := Parse(label, "c", "p/"); err != nil || got.Port != 9 {
		t.Errorf("Parse with a port label = %+v, %v; want port 9", got, err)
	}
	for key, values := range map[string][]string{
		"port": {"0", "65536", "-1", "80"}, "cleartext-port": {"on", "443"}, "tls": {"on", "relative/path"}, "client-auth": {"maybe", "require"},
		"concurrency": {"0", "many"}, "request-timeout": {"0s", "5", "48h"}, "max-message-bytes": {"0", "1.5"}, "reuse": {"yes"},
		"reuse-requests": {"0", "some"}, "reuse-age": {"0s", "25h"}, "snapshot": {"true", "on"},
		"cors-origins": {"app.example", "https://app.example/", "null", "https://a.example,",
			strings.Repeat("https://a.example,", maxOrigins) + "*"}, "cors-credentials": {"yes", "true"},
		"blobstore": {"objects", "./objects"},
	} {
		for _, v := range values {
			_, err := Parse(&runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/" + key: v}}, "c", "p/")
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "annotation p/") {
				t.Errorf("Parse with %s=%s = %v, want ErrInvalidArgument", key, v, err)
			}
		}
	}
	open := map[string]string{"p/cors-origins": "*", "p/cors-credentials": "true"}
	if _, err := Parse(&runtimeapi.PodSandboxConfig{Annotations: open}, "c", "p/"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Parse with credentials for every origin = %v, want ErrInvalidArgument", err)
	}
	dark := map[string]string{"p/tls": "off", "p/cleartext-port": "off"}
	if _, err := Parse(&runtimeapi.PodSandboxConfig{Annotations: dark}, "c", "p/"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Parse without ports = %v, want ErrInvalidArgument", err)
	}
}
