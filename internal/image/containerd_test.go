package image

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
oom_score = 0
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "%[1]s/sock"
`

// peerContainerd is a containerd that pulls the images of these tests.
type peerContainerd struct {
	t    *testing.T
	conn *grpc.ClientConn
}

// startContainerd starts the containerd in a directory of programs, for the duration of a test.
func startContainerd(t *testing.T, programs string) peerContainerd {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctd") // a socket's path must be short
	check(t, err)
	config := filepath.Join(dir, "config.toml")
	check(t, os.WriteFile(config, fmt.Appendf(nil, containerdConfig, dir), 0o600))
	cmd := exec.Command(filepath.Join(programs, "containerd"), "--config", config, "--log-level", "error")
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	check(t, cmd.Start())
	conn, err := grpc.NewClient("unix://"+dir+"/sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	t.Cleanup(func() {
		_ = conn.Close()
		check(t, cmd.Process.Signal(syscall.SIGTERM))
		_ = cmd.Wait()
		check(t, os.RemoveAll(dir))
	})
	until.NoError(t, time.Minute, func() error {
		_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(t.Context(), &runtimeapi.VersionRequest{})
		return err
	})
	return peerContainerd{t, conn}
}

// pull pulls an image by the CRI. It returns an error's text, or "".
func (p peerContainerd) pull(ref string) string {
	_, err := runtimeapi.NewImageServiceClient(p.conn).PullImage(p.t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
	if err != nil {
		return err.Error()
	}
	return ""
}

// root mounts the root filesystem of a pulled image.
func (p peerContainerd) root(m *rawImage) string {
	p.t.Helper()
	var config ocispec.Image
	check(p.t, json.Unmarshal(m.blobs[len(m.blobs)-1], &config))
	chain := identity.ChainID(config.RootFS.DiffIDs).String()
	ctx := namespaces.WithNamespace(context.Background(), "k8s.io")
	snapshots := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(p.conn), "overlayfs")
	mounts, err := snapshots.View(ctx, "view-"+chain, chain)
	check(p.t, err)
	return mounted(p.t, mounts)
}

// TestContainerdInTheField pulls the images of the field with containerd, and compares its answers with those in
// testdata/containerd.txt, from which docs/field.md has them: only what differs from Tripod is there. The directory with
// containerd's programs is in TRIPOD_TEST_CONTAINERD; -update writes the file.
//
//	TRIPOD_TEST_CONTAINERD=$(hack/containerd.sh) hack/testns.sh go test ./internal/image -run TestContainerdInTheField
func TestContainerdInTheField(t *testing.T) {
	programs := os.Getenv("TRIPOD_TEST_CONTAINERD")
	if programs == "" {
		t.Skip("TRIPOD_TEST_CONTAINERD names no directory with the programs of containerd; hack/containerd.sh prints one")
	}
	c := comparison{startContainerd(t, programs), newRegistry(t), map[string]string{}}
	c.layers()
	c.compressions()
	c.manifests()
	c.registries()
	c.types()
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(c.answers)) {
		fmt.Fprintf(&text, "%s: %s\n", name, c.answers[name])
	}
	const golden = "testdata/containerd.txt"
	if *update {
		check(t, os.WriteFile(golden, []byte(text.String()), 0o644))
	}
	if want := read(t, golden); text.String() != want {
		t.Errorf("containerd's answers: got\n%s\nwant\n%s", text.String(), want)
	}
}

var update = flag.Bool("update", false, "rewrite the answers of containerd")

// comparison collects the answers of containerd that differ from those of Tripod.
type comparison struct {
	peer    peerContainerd
	reg     *testRegistry
	answers map[string]string
}

// before matches what is before the cause in an error of a pull, and changing what is another text in each run.
var (
	before   = regexp.MustCompile(`(?s)^.* as "extract-[^"]*": |^.*pull and unpack image "[^"]*": `)
	changing = regexp.MustCompile(`sha256:[0-9a-f]+|127\.0\.0\.1:[0-9]+|/[^ :]*/(snapshots/[0-9]+/fs|containerd-mount[0-9]+)`)
)

// pull pulls an image that Tripod can pull, or refuses by name.
func (c comparison) pull(name, ref string) bool {
	failed := c.peer.pull(ref)
	if failed != "" {
		c.answers[name] = changing.ReplaceAllString(before.ReplaceAllString(failed, ""), "…")
	}
	return failed == ""
}

func (c comparison) layers() {
	lower, layers := fieldLayers(c.peer.t)
	for name, l := range layers {
		m := raw(c.peer.t, lower, tarOf(c.peer.t, l.layer...))
		if !c.pull("layer, "+name, m.push(c.peer.t, c.reg, fmt.Sprintf("layers/%x", name))) {
			continue
		}
		root, found := c.peer.root(m), []string{}
		for _, at := range slices.Sorted(maps.Keys(l.want)) {
			if got := look(filepath.Join(root, at), strings.HasSuffix(at, "/")); got != l.want[at] {
				found = append(found, fmt.Sprintf("%s has %q", at, strings.ReplaceAll(got, root, "")))
			}
		}
		if len(found) > 0 {
			c.answers["layer, "+name] = strings.Join(found, ", ")
		}
	}
}

func (c comparison) compressions() {
	for _, mediaType := range layerTypes {
		for name, compress := range compressions(c.peer.t) {
			c.pull(name+" labelled "+mediaType, labelled(c.peer.t, mediaType, name, compress).push(c.peer.t, c.reg, "labelled"))
		}
	}
}

func (c comparison) manifests() {
	for name, change := range map[string]func(m *rawImage){
		"config of application/octet-stream": func(m *rawImage) {
			m.manifest.MediaType, m.manifest.Config.MediaType = images.MediaTypeDockerSchema2Manifest, mediaTypeUnknown
			m.manifest.Layers[0].MediaType = images.MediaTypeDockerSchema2LayerGzip
		},
		"layer of no bytes": func(m *rawImage) {
			m.blobs[0] = nil
			m.manifest.Layers[0] = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("")}
		},
	} {
		m := raw(c.peer.t, tarOf(c.peer.t, file(name, "")))
		change(m)
		c.pull("manifest, "+name, c.reg.pushRaw(c.peer.t, "config", "1", m.manifest.MediaType, m.manifest, m.blobs...))
	}
}

// registries pulls from registries that answer in ways of their own.
func (c comparison) registries() {
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"token":"granted"}`) }))
	defer tokens.Close()
	for name, hook := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"HEAD is forbidden": func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodHead {
				w.WriteHeader(http.StatusForbidden)
			}
			return r.Method == http.MethodHead
		},
		"two challenges in one header": func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("Authorization") == "Bearer granted" {
				return false
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Basic realm="r", Bearer realm=%q,service="s"`, tokens.URL))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		},
		"manifests break off": func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				panic(http.ErrAbortHandler)
			}
			http.NotFound(w, r)
			return true
		},
	} {
		m := raw(c.peer.t, tarOf(c.peer.t, file(name, "")))
		manifest := m.pushAs(c.peer.t, c.reg, "registry", ocispec.MediaTypeImageManifest, m.manifest, nil)
		c.reg.setHook(hook)
		c.pull("registry, "+name, c.reg.ref("registry@"+manifest.Digest.String()))
		c.reg.setHook(nil)
	}
}

// types pulls manifests with types that say nothing.
func (c comparison) types() {
	for _, given := range []string{"", mediaTypeUnknown, "application/json", "text/plain"} {
		m := raw(c.peer.t, tarOf(c.peer.t, file("type", given)))
		document, err := json.Marshal(m.manifest)
		check(c.peer.t, err)
		ref := m.push(c.peer.t, c.reg, "typed")
		c.reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.Header()["Content-Type"] = nil
			if given != "" {
				w.Header().Set("Content-Type", given)
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(document))
			return true
		})
		c.pull(fmt.Sprintf("manifest of the type %q", given), ref)
		c.reg.setHook(nil)
	}
}
