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
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	dockerconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
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
[plugins."io.containerd.cri.v1.images".registry]
config_path = "%[1]s/hosts"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "%[2]s"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
`

// peerContainerd is a containerd that pulls the images of these tests.
type peerContainerd struct {
	t     *testing.T
	conn  *grpc.ClientConn
	hosts string // a link to the directory with the hosts.toml files
}

// startContainerd starts the containerd in a directory of programs, for the duration of a test. Its pods have a pause image.
func startContainerd(t *testing.T, programs, pause string) peerContainerd {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctd") // a socket's path must be short
	check(t, err)
	config := filepath.Join(dir, "config.toml")
	check(t, os.WriteFile(config, fmt.Appendf(nil, containerdConfig, dir, pause), 0o600))
	cmd := exec.Command(filepath.Join(programs, "containerd"), "--config", config, "--log-level", "error")
	cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH")) // the shim is there
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
	return peerContainerd{t, conn, filepath.Join(dir, "hosts")}
}

// configure makes the next pulls read the hosts.toml files in a directory.
func (p peerContainerd) configure(dir string) {
	p.t.Helper()
	check(p.t, os.RemoveAll(p.hosts))
	check(p.t, os.Symlink(dir, p.hosts))
}

// pull pulls an image by the CRI, with a login or nil. It returns an error's text, or "".
func (p peerContainerd) pull(ref string, login *runtimeapi.AuthConfig) string {
	req := &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}, Auth: login}
	_, err := runtimeapi.NewImageServiceClient(p.conn).PullImage(p.t.Context(), req)
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

// TestContainerdInTheField pulls the images of the field with containerd, and starts containers of some with runc. It compares
// the answers with those in testdata/containerd.txt, from which docs/field.md has them: only what differs from Tripod is there. The
// directory with containerd's programs is in TRIPOD_TEST_CONTAINERD; -update writes the file.
//
//	TRIPOD_TEST_CONTAINERD=$(hack/containerd.sh) hack/testns.sh go test ./internal/image -run TestContainerdInTheField
func TestContainerdInTheField(t *testing.T) {
	programs := os.Getenv("TRIPOD_TEST_CONTAINERD")
	if programs == "" {
		t.Skip("TRIPOD_TEST_CONTAINERD names no directory with the programs of containerd; hack/containerd.sh prints one")
	}
	reg := newRegistry(t)
	c := comparison{startContainerd(t, programs, pauseImage(t, reg)), reg, map[string]string{}}
	c.layers()
	c.compressions()
	c.manifests()
	c.registries()
	c.types()
	c.longDigests()
	c.mirrors()
	c.downgrades()
	c.containers()
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

// before matches what is before the cause in an error, and changing what is another text in each run.
var (
	before   = regexp.MustCompile(`(?s)^.* as "extract-[^"]*": |^.*pull and unpack image "[^"]*": |^rpc error: code = \w+ desc = `)
	changing = regexp.MustCompile(`((config|layer)-)?sha(256|512):[0-9a-f]+|[0-9a-f]{64}|expected [0-9]+ bytes|127\.0\.0\.1:[0-9]+|/[^ :]*/(snapshots/[0-9]+/fs|containerd-mount[0-9]+)`)
)

// pull pulls an image that Tripod can pull, or refuses by name.
func (c comparison) pull(name, ref string) bool {
	failed := c.peer.pull(ref, nil)
	if failed != "" {
		c.add(name, failed)
	}
	return failed == ""
}

// add adds an answer.
func (c comparison) add(name, answer string) {
	c.answers[name] = changing.ReplaceAllString(before.ReplaceAllString(answer, ""), "…")
}

// addReceived adds what came to a server to which Tripod sends nothing, or no secret.
func (c comparison) addReceived(name string, s *spy) {
	if s.hits > 0 {
		slices.Sort(s.seen)
		c.add(name, fmt.Sprintf("used, with %q", slices.Compact(s.seen)))
	}
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
	entries := oddTimes()
	m := raw(c.peer.t, tarOf(c.peer.t, entries...))
	if !c.pull("layer, odd times", m.push(c.peer.t, c.reg, "times")) {
		return
	}
	root := c.peer.root(m)
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(root, e.Name))
		check(c.peer.t, err)
		if got := info.ModTime().UTC(); !got.Equal(time.Unix(0, 0)) {
			c.add(fmt.Sprintf("layer, the time %v", e.ModTime), got.String())
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
		"OCI's types in Docker's manifest": func(m *rawImage) { m.manifest.MediaType = images.MediaTypeDockerSchema2Manifest },
		"Docker's types in OCI's manifest": func(m *rawImage) {
			m.manifest.Config.MediaType, m.manifest.Layers[0].MediaType = images.MediaTypeDockerSchema2Config, images.MediaTypeDockerSchema2LayerGzip
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
	nested, manifests := pushNested(c.peer.t, c.reg)
	if both := nested + "@" + manifests[0].Digest.String(); c.pull("tag and digest", both) {
		req := &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: both}}
		s, err := runtimeapi.NewImageServiceClient(c.peer.conn).ImageStatus(c.peer.t.Context(), req)
		check(c.peer.t, err)
		if tags := s.GetImage().GetRepoTags(); len(tags) > 0 {
			c.add("tag and digest", fmt.Sprintf("gets the tags %q", tags))
		}
	}
	c.pull("index in an index", nested)
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
		"signed URL is refused": func(w http.ResponseWriter, r *http.Request) bool {
			switch {
			case r.URL.Query().Has("X-Amz-Signature"):
				w.WriteHeader(http.StatusForbidden)
			case strings.Contains(r.URL.Path, "/blobs/"):
				http.Redirect(w, r, r.URL.Path+"?X-Amz-Signature=topsecret", http.StatusTemporaryRedirect)
			default:
				return false
			}
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
	ref := raw(c.peer.t, tarOf(c.peer.t, file("encoded", strings.Repeat("x", 1<<16)))).push(c.peer.t, c.reg, "encoded")
	encode(c.peer.t, c.reg)
	c.pull("registry, encoded answers", ref)
	c.reg.setHook(nil)
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

// longDigests pulls images whose parts have a digest of sha512.
func (c comparison) longDigests() {
	for _, of := range []string{"manifest", "config", "layer"} {
		m := raw(c.peer.t, tarOf(c.peer.t, file("sha512 of", of)))
		var blob []byte
		switch of {
		case "config":
			blob = m.blobs[1]
			m.manifest.Config.Digest = digest.SHA512.FromBytes(blob)
		case "layer":
			blob = m.blobs[0]
			m.manifest.Layers[0].Digest = digest.SHA512.FromBytes(blob)
		}
		ref := m.push(c.peer.t, c.reg, "long")
		if of == "manifest" {
			var err error
			blob, err = json.Marshal(m.manifest)
			check(c.peer.t, err)
			ref = c.reg.ref("long@" + digest.SHA512.FromBytes(blob).String())
		}
		c.reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "/"+digest.SHA512.FromBytes(blob).String()) {
				return false
			}
			w.Header().Set("Content-Type", m.manifest.MediaType)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(blob))
			return true
		})
		if name := "sha512 of the " + of; c.pull(name, ref) {
			c.add(name, "pulled")
		}
		c.reg.setHook(nil)
	}
}

// mirrors pulls from a registry with a mirror before it.
func (c comparison) mirrors() {
	for name, answers := range oddMirrors(c.peer.t, c.reg) {
		mirror := httptest.NewServer(answers)
		defer mirror.Close()
		raw(c.peer.t, tarOf(c.peer.t, file("mirror", name))).push(c.peer.t, c.reg, "mirrored")
		c.peer.configure(hostsToml(c.peer.t, "registry.example", fmt.Sprintf(mirrorToml, c.reg.URL, mirror.URL)))
		c.pull("mirror, "+name, "registry.example/mirrored:1")
	}
}

// downgrades pulls from and pushes to a registry with TLS that names addresses without it. The library pushes: the CRI does not.
func (c comparison) downgrades() {
	t, ref := c.peer.t, "registry.example/app:1"
	dir, _ := overTLS(t, c.reg, "[header]\nX-Secret = \"s\"\n")
	c.peer.configure(dir)
	defer c.reg.setHook(nil)

	tokens := newTokens(t, c.reg)
	raw(t, tarOf(t, file("downgrade", "tokens"))).push(t, c.reg, "app")
	if failed := c.peer.pull(ref, &runtimeapi.AuthConfig{Username: "me", Password: "secret"}); failed != "" {
		c.add("without TLS, pull with a token", failed)
	}
	c.addReceived("without TLS, token server", tokens)

	store := newBlobStore(t, c.reg)
	raw(t, tarOf(t, file("downgrade", "redirect"))).push(t, c.reg, "app")
	c.pull("without TLS, pull after a redirect", ref)
	c.addReceived("without TLS, redirect", store)

	uploads := newUploads(t, c.reg)
	m := raw(t, tarOf(t, file("downgrade", "upload")))
	pusher, err := docker.NewResolver(docker.ResolverOptions{Hosts: dockerconfig.ConfigureHosts(t.Context(), dockerconfig.HostOptions{
		HostDir:     dockerconfig.HostDirFromRoot(dir),
		Credentials: func(string) (string, string, error) { return "me", "secret", nil },
	})}).Pusher(t.Context(), ref)
	check(t, err)
	layer := m.manifest.Layers[0]
	w, err := pusher.Push(t.Context(), layer)
	check(t, err)
	check(t, content.Copy(t.Context(), w, bytes.NewReader(m.blobs[0]), layer.Size, layer.Digest))
	c.addReceived("without TLS, upload", uploads)
}
