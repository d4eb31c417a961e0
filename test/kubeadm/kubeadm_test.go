package kubeadm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

func TestMain(m *testing.M) { harness.Main(m) }

const (
	socket      = "unix:///run/tripod/tripod.sock"
	noRuntime   = "[WARNING CRI]"
	apiEndpoint = "localAPIEndpoint: {advertiseAddress: 192.0.2.10}\n" // a world has no default route
)

// files returns the two files of the page.
func files(t *testing.T) (initFile, joinFile string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(harness.Root(), "docs/kubeadm.md"))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, part := range strings.Split(string(page), "\n```yaml\n")[1:] {
		block, _, _ := strings.Cut(part, "\n```\n")
		found = append(found, block+"\n")
	}
	if len(found) != 2 {
		t.Fatalf("files in docs/kubeadm.md: got %d, want 2", len(found))
	}
	return found[0], found[1]
}

// kubeadm runs the program with a configuration and returns its output.
func kubeadm(t *testing.T, config string, args ...string) (string, error) {
	t.Helper()
	dir, err := kube.Programs("kubeadm")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(filepath.Join(dir, "kubeadm"), append(args, "--config", file)...)
	c.Env = append(os.Environ(), "KUBEADM_INIT_DRYRUN_DIR="+filepath.Dir(file))
	out, err := c.CombinedOutput()
	return string(out), err
}

// TestFiles: kubeadm accepts both files, and refuses an unknown field.
func TestFiles(t *testing.T) {
	initFile, joinFile := files(t)
	for _, file := range []string{initFile, joinFile} {
		if out, err := kubeadm(t, file, "config", "validate"); err != nil || !strings.HasSuffix(out, "ok\n") {
			t.Errorf("config validate: got %v, %s\nof\n%s", err, out, file)
		}
		wrong := strings.Replace(file, "criSocket:", "criSockets:", 1)
		if out, err := kubeadm(t, wrong, "config", "validate"); err == nil && strings.HasSuffix(out, "ok\n") {
			t.Errorf("config validate accepts an unknown field: %s", out)
		}
	}
	if out, err := kubeadm(t, initFile, "config", "images", "list"); err != nil ||
		!strings.Contains(out, "registry.k8s.io/kube-apiserver:v1.37.0") {
		t.Errorf("config images list: got %v, %s", err, out)
	}
}

// TestPreflight: kubeadm finds the runtime at its socket, and writes the socket into the kubelet's configuration.
func TestPreflight(t *testing.T) {
	initFile, _ := files(t)
	d := harness.StartDaemon(t)
	initFile = strings.Replace(initFile, "nodeRegistration:\n", apiEndpoint+"nodeRegistration:\n  imagePullPolicy: Never\n", 1)
	ours := strings.Replace(initFile, socket, "unix://"+d.Socket, 1)
	preflight := []string{"init", "phase", "preflight", "--ignore-preflight-errors=all"}
	if out, err := kubeadm(t, ours, preflight...); err != nil || strings.Contains(out, noRuntime) {
		t.Errorf("preflight: got %v, %s\nwant no warning about the runtime", err, out)
	}
	missing := strings.Replace(initFile, socket, "unix:///run/no-runtime.sock", 1)
	if out, _ := kubeadm(t, missing, preflight...); !strings.Contains(out, noRuntime) {
		t.Errorf("preflight without a runtime: got %s\nwant a warning about it", out)
	}
	out, err := kubeadm(t, ours, "init", "phase", "kubelet-start", "--dry-run")
	_, written, _ := strings.Cut(out, "Writing kubelet configuration to file \"")
	written, _, _ = strings.Cut(written, "\"")
	text, readErr := os.ReadFile(filepath.Join(filepath.Dir(written), "config.yaml"))
	if err != nil || readErr != nil || !strings.Contains(string(text), "containerRuntimeEndpoint: unix://"+d.Socket) {
		t.Errorf("kubelet-start: got %v, %v, %s\n%s\nwant the daemon's socket", err, readErr, out, text)
	}
}
