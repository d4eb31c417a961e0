package unitpods

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/keys"
)

// FuzzPlan: no data make the runtime panic, use paths outside its roots, or return an error without a class.
func FuzzPlan(f *testing.F) {
	for _, seed := range []string{
		`{"uuid":"u","name":"n","file":"f","args":["a"],"env":["A=1"],"dirs":["in::/data"],"resources":{"memory":"1Mi","cpu":1,"deadline":"1s"}}`,
		`{"uuid":"../x","args":{"argv":["a"],"env":["B"],"dirs":"/etc"},"channels":[{"mode":"rw","topic":"$SL/x","qos":2},{"topic":"a/+","mode":"r"}]}`,
		`{"uuid":"u","dir":["..","/","a::/ch"],"resources":{"memory":-1,"cpu":"1e99","deadline":1e308}}`,
		`{"uuid":"positions","dirs":"` + strings.Repeat("x", 300) + `"}`, `{"uuid":"positions"}`,
		`{"uuid":"u","name":"Ü/\u0000","resources":[],"channels":{}}`,
	} {
		f.Add([]byte(seed))
	}
	root := f.TempDir()
	r := &Runtime{Config: Config{Name: "r", UUID: "r", LogDir: "/logs", DirRoots: []string{root}, Topics: wire.Topics{Realm: "realm"}}}
	f.Fuzz(func(t *testing.T, raw []byte) {
		data, err := wire.ParseModuleData(raw)
		if err != nil || data.Validate() != nil {
			return
		}
		p, err := r.plan(data)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) && !errdefs.IsNotFound(err) && !errdefs.IsPermissionDenied(err) {
				t.Errorf("no class: %v", err)
			}
			return
		}
		if wrong := validation.IsDNS1123Label(p.pod.Metadata.Name); len(wrong) > 0 {
			t.Errorf("the pod is called %q: %v", p.pod.Metadata.Name, wrong)
		}
		if filepath.Dir(p.logDir) != "/logs" || filepath.Base(p.logDir) == positionsDir {
			t.Errorf("the log is in %s", p.logDir)
		}
		for _, m := range p.container.Mounts {
			if m.HostPath != root && !strings.HasPrefix(m.HostPath, root+"/") {
				t.Errorf("a directory at %s", m.HostPath)
			}
		}
		if text, ok := p.container.Annotations[keys.EdgeChannels]; ok {
			if _, err := channel.Parse(text); err != nil {
				t.Error(err)
			}
		}
	})
}
