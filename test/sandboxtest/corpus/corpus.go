// Package corpus holds requests as a real kubelet writes them, for tests of what is accepted. README.md says where they come
// from. It must not know a backend: which pods a kind cannot run is its own test's to say.
package corpus

import (
	"embed"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

//go:embed testdata/*.json
var files embed.FS

// Pod is what a kubelet sends for a pod of one container.
type Pod struct {
	// Name is that of the pod in pods.yaml, with dashes for spaces.
	Name      string
	Sandbox   *runtimeapi.PodSandboxConfig
	Container *runtimeapi.ContainerConfig
}

// Pods are all pods of the corpus, by name. Whoever asks may change them.
func Pods(t testing.TB) []Pod {
	t.Helper()
	entries, err := files.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	pods := make([]Pod, len(entries))
	for i, e := range entries {
		pods[i] = read(t, e.Name())
	}
	return pods
}

func read(t testing.TB, name string) Pod {
	t.Helper()
	raw, err := files.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	var messages struct{ Sandbox, Container json.RawMessage }
	if err := json.Unmarshal(raw, &messages); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	p := Pod{Name: strings.TrimSuffix(name, ".json"), Sandbox: &runtimeapi.PodSandboxConfig{}, Container: &runtimeapi.ContainerConfig{}}
	for raw, m := range map[string]proto.Message{string(messages.Sandbox): p.Sandbox, string(messages.Container): p.Container} {
		if err := protojson.Unmarshal([]byte(raw), m); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return p
}

// MoveBelow moves what the pod mounts below dir and makes it there: empty files where the kubelet makes files, else directories.
func (p Pod) MoveBelow(t testing.TB, dir string) {
	t.Helper()
	for _, m := range p.Container.GetMounts() {
		m.HostPath = filepath.Join(dir, m.GetHostPath())
		file := filepath.Base(m.GetHostPath()) == "etc-hosts" || strings.Contains(m.GetHostPath(), "/containers/")
		below := m.GetHostPath()
		if file {
			below = filepath.Dir(below)
		}
		err := os.MkdirAll(below, 0o755)
		if err == nil && file {
			err = os.WriteFile(m.GetHostPath(), nil, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
