package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/test/harness"
)

// write writes a file and returns its path.
func write(t *testing.T, dir, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// gpgKey makes a key with GnuPG and returns its fingerprint and the file of the public key.
func gpgKey(t *testing.T, home string) (fingerprint, public string) {
	t.Helper()
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	gpg := func(args ...string) string {
		t.Helper()
		c := exec.Command(args[0], args[1:]...)
		c.Env = append(os.Environ(), "GNUPGHOME="+home)
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return string(out)
	}
	t.Cleanup(func() { gpg("gpgconf", "--kill", "all") })
	gpg("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", "signer@example.test", "ed25519", "sign", "never")
	for line := range strings.Lines(gpg("gpg", "--with-colons", "--list-keys")) {
		if fields := strings.Split(line, ":"); fields[0] == "fpr" {
			fingerprint = fields[9]
		}
	}
	return fingerprint, write(t, home, "public.asc", []byte(gpg("gpg", "--armor", "--export", fingerprint)))
}

// TestImageSignatures checks the OpenPGP signatures of skopeo and GnuPG. Debian's skopeo cannot make sigstore's, which
// internal/image tests.
func TestImageSignatures(t *testing.T) {
	dir, addr := t.TempDir(), harness.Registry(t).Addr
	fingerprint, public := gpgKey(t, filepath.Join(dir, "gnupg"))
	registries := filepath.Join(dir, "registries.d")
	if err := os.Mkdir(registries, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, registries, "test.yaml", fmt.Appendf(nil, "docker:\n  %s:\n    lookaside: file://%s/lookaside\n", addr, dir))
	policy := fmt.Sprintf(`{"default":[{"type":"insecureAcceptAnything"}],"transports":{"docker":{
		"%[1]s/signed":[{"type":"signedBy","keyType":"GPGKeys","keyPath":"%[2]s"}], "%[1]s/reject":[{"type":"reject"}]}}}`, addr, public)
	policyFile := write(t, dir, "policy.json", []byte(policy))
	source := "docker://" + addr + "/" + strings.TrimPrefix(markers, harness.ImagePrefix) + "1:latest"
	push := func(image string, sign ...string) string {
		t.Helper()
		args := append([]string{"--registries.d", registries, "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false",
			"--dest-tls-verify=false"}, sign...)
		c := exec.Command("skopeo", append(args, source, "docker://"+addr+"/"+image)...)
		c.Env = append(os.Environ(), "GNUPGHOME="+filepath.Join(dir, "gnupg"))
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
		return addr + "/" + image
	}
	gpg := []string{"--sign-by", fingerprint}
	good := []string{push("signed/app:1", gpg...), push("free/app:1")}
	bad := map[string]string{
		push("signed/other:1"):       "no signature",
		push("signed/app:2"):         "signed/app:1", // the signature names another tag
		push("reject/app:1", gpg...): "rejected",
	}

	d := harness.StartDaemon(t, harness.Set("image.signature_policy", policyFile), harness.Set("image.registries_dir", registries))
	for _, image := range good {
		d.Pull(t, image)
	}
	for image, reason := range bad {
		_, err := d.Images().PullImage(context.Background(), spec(image), nil, nil)
		// The kubelet compares the beginning of its client's error text.
		if err == nil || !strings.HasPrefix(err.Error(), crierrors.ErrSignatureValidationFailed.Error()) ||
			!strings.Contains(err.Error(), reason) {
			t.Errorf("%s: got error %v, want %v with %q", image, err, crierrors.ErrSignatureValidationFailed, reason)
		}
		if i := imageOf(t, d, image); i != nil {
			t.Errorf("%s: the refused image is stored", image)
		}
	}
	// A change of the policy applies without a restart. A broken policy refuses everything, and pods keep running.
	write(t, dir, "policy.json", []byte(`{"default":`))
	c := startPod(t, d).Create(harness.ContainerConfig("c", good[0]))
	_, err := d.ImageCRI().PullImage(context.Background(), &runtimeapi.PullImageRequest{Image: spec(good[1])})
	wantCode(t, err, codes.Unknown)
	if err == nil || !strings.Contains(err.Error(), policyFile) {
		t.Errorf("got error %v, want the name of the policy's file", err)
	}
	if c.Status().GetImage().GetImage() != good[0] {
		t.Errorf("image of the container: got %v, want %s", c.Status().GetImage(), good[0])
	}
}
