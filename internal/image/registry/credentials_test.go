package registry

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestLoginOfTheLongestPrefix: a docker config may have logins for a registry and for parts of it. One that cannot be read
// concerns only what it is for.
func TestLoginOfTheLongestPrefix(t *testing.T) {
	encoded := func(user string) string { return base64.StdEncoding.EncodeToString([]byte(user + ":secret")) }
	config := filepath.Join(t.TempDir(), "config.json")
	err := os.WriteFile(config, fmt.Appendf(nil, `{"auths": {
		"registry.example": {"auth": %q}, "registry.example/a": {"auth": %q}, "https://registry.example/a/deep/": {"auth": %q},
		"https://old.example/v1/": {"auth": %q}, "https://index.docker.io/v1/": {"auth": %q},
		"broken.example": {"auth": "%%%%%%"}, "registry.example/a/helper": {}, "docker.io": {}, "registry.example/broken": {"auth": 7}}}`,
		encoded("host"), encoded("a"), encoded("deep"), encoded("old"), encoded("hub")), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for at, want := range map[string]string{
		"registry.example/app": "host", "registry.example/a": "a", "registry.example/a/app": "a", "registry.example/ab/app": "host",
		"registry.example/a/deep/app": "deep", "registry.example/a/deeper": "a", "registry.example/a/helper/app": "a", "old.example/app": "old",
		"registry-1.docker.io/library/x": "hub",
		"unknown.example/app":            "", "broken.example/app": "error", "registry.example/broken/app": "error",
	} {
		host, repository, _ := strings.Cut(at, "/")
		l, err := newLogins(nil, config, host, repository)
		if err != nil {
			t.Fatal(err)
		}
		found, err := l.find(host)
		if got := found.username; (err != nil) != (want == "error") || err == nil && got != want {
			t.Errorf("%s: got the login of %q, %v; want that of %q", at, got, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "%%%") {
			t.Errorf("%s: error %q contains the login", at, err)
		}
	}
}

func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"https://index.docker.io/v1/":{"auth":"bWU6c2VjcmV0"},"x":{"identitytoken":"t"}}}`))
	f.Add([]byte(`{"auths":{"":null,"a/b":{"auth":"%"}}}`))
	path := filepath.Join(f.TempDir(), "config.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := readDockerConfig(path); err != nil && !errdefs.IsFailedPrecondition(err) && !errdefs.IsInvalidArgument(err) {
			t.Errorf("readDockerConfig() returned an error of the wrong class: %v", err)
		}
	})
}
