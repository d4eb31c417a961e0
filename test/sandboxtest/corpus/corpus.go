// Package corpus contains requests from a real kubelet, for tests of what a backend accepts. README.md says how they
// were recorded. The package must not know about backends; the tests of each backend say which pods that backend cannot
// run.
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

// Pod is a kubelet's requests for a pod with one container.
type Pod struct {
	// Name is the name of the pod in pods.yaml, with dashes for spaces.
	Name      string
	Sandbox   *runtimeapi.PodSandboxConfig
	Container *runtimeapi.ContainerConfig
}

// Pods returns all pods of the corpus, sorted by name. The caller may change them.
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

// InUserNamespace changes the requests to those for a pod with hostUsers: false. The kubelet then adds the mapping that
// it has chosen to the pod, to the container and to each mount.
func (p Pod) InUserNamespace() Pod {
	mapping := func() []*runtimeapi.IDMapping {
		return []*runtimeapi.IDMapping{{HostId: 3 << 16, Length: 1 << 16}}
	}
	for _, o := range []*runtimeapi.NamespaceOption{
		p.Sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions(), p.Container.GetLinux().GetSecurityContext().GetNamespaceOptions(),
	} {
		o.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapping(), Gids: mapping()}
	}
	for _, m := range p.Container.GetMounts() {
		m.UidMappings, m.GidMappings = mapping(), mapping()
	}
	return p
}

// MoveBelow moves the host paths of the pod's mounts below the given directory and creates them: empty files where the
// kubelet creates files, otherwise directories.
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
