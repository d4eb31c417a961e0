package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
	"github.com/tripod-run/tripod/test/until"
)

// TestSplitImageFileSystem: with the containers' layers on a file system of their own, the kubelet shows its capacity for a
// container, and evicts a pod that writes more than its limit of ephemeral storage.
func TestSplitImageFileSystem(t *testing.T) {
	c := kube.Shared(t)
	const size = 96 << 20
	dir := mountContainers(t, c, size)
	t.Cleanup(func() {
		if err := c.RestartDaemon(); err != nil {
			t.Error(err)
		}
	})
	// The kubelet reads the list of file systems when it starts.
	if err := errors.Join(c.RestartDaemon(map[string]map[string]any{"image": {"containers_dir": dir}}), c.RestartKubelet()); err != nil {
		t.Fatal(err)
	}
	n := c.Namespace(t)
	n.Apply(strings.Replace(client, `"3600"]`, `"3600"], resources: {limits: {ephemeral-storage: 1Mi}}`, 1))
	n.WaitReady("client", kube.Timeout)
	n.Await("the file systems in the summary", kube.Timeout, func() error {
		images, container, err := fileSystems(n, "client")
		if err == nil && (container != size || images == size) {
			err = fmt.Errorf("got capacities of %d bytes for images and %d for the container, want %d only for the container", images, container,
				size)
		}
		return err
	})
	n.Kubectl("exec", "client", "--", "dd", "if=/dev/zero", "of=/written", "bs=1M", "count=4")
	pod := n.WaitPod("client", "is evicted", 2*kube.Timeout, func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted"
	})
	if !strings.Contains(pod.Status.Message, "storage") {
		t.Errorf("message: got %q, want the limit of storage", pod.Status.Message)
	}
}

// mountContainers mounts a file system for the layers of containers. When the test ends, it is unmounted once the kubelet
// has removed the containers.
func mountContainers(t *testing.T, c *kube.Cluster, size int) string {
	t.Helper()
	dir := filepath.Join(c.Dir, "containers")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("containers", dir, "tmpfs", 0, fmt.Sprint("size=", size)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := until.Poll(2*kube.Timeout, func() error {
			if left, _ := filepath.Glob(dir + "/tripod-layers/*/*"); len(left) > 0 {
				return fmt.Errorf("layers are left: %v", left)
			}
			return unix.Unmount(dir, 0)
		}); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// fileSystems returns the capacities of the file systems of images and of a pod's container, as the kubelet reports them.
func fileSystems(n *kube.Namespace, pod string) (images, container uint64, err error) {
	type fs struct{ CapacityBytes uint64 }
	var summary struct {
		Node struct{ Runtime struct{ ImageFs fs } }
		Pods []struct {
			PodRef     struct{ Name, Namespace string }
			Containers []struct{ Rootfs fs }
		}
	}
	err = n.Cluster.Get("/api/v1/nodes/"+kube.NodeName+"/proxy/stats/summary", &summary)
	for _, p := range summary.Pods {
		if p.PodRef.Name == pod && p.PodRef.Namespace == n.Name && len(p.Containers) == 1 {
			container = p.Containers[0].Rootfs.CapacityBytes
		}
	}
	return summary.Node.Runtime.ImageFs.CapacityBytes, container, err
}

// provider configures a credential provider for the images of one registry, and says which audience its tokens have.
const provider = `{"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig", "providers": [{
  "name": "token-password", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "matchImages": [%q], "defaultCacheDuration": "0s",
  "tokenAttributes": {"serviceAccountTokenAudience": "registry.test", "cacheType": "Token", "requireServiceAccount": true}}]}`

// tokenPassword is a credential provider plugin that uses the token of the pod's service account as the password.
const tokenPassword = `#!/bin/sh
token=$(sed -n 's/.*"serviceAccountToken":"\([^"]*\)".*/\1/p')
printf '{"apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse", "cacheKeyType": "Registry", "cacheDuration": "0s", "auth": {"%s": {"username": "token", "password": "%%s"}}}' "$token"
`

// audience lets nodes request tokens for the registry.
const audience = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: registry-audience}
rules: [{verbs: [request-serviceaccounts-token-audience], apiGroups: [""], resources: [registry.test]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: registry-audience}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: registry-audience}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:nodes"}]
`

// TestImageCredentials: a credential provider turns the token of a pod's service account into credentials, with which the
// runtime pulls images of each kind. Another service account gets no image.
func TestImageCredentials(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	registry := tokenRegistry(t, c, "system:serviceaccount:"+n.Name+":puller")
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	if err := errors.Join(
		os.WriteFile(config, fmt.Appendf(nil, provider, registry), 0o644),
		os.WriteFile(filepath.Join(dir, "token-password"), fmt.Appendf(nil, tokenPassword, registry), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	n.Apply(audience)
	t.Cleanup(func() { n.Kubectl("delete", "clusterrole,clusterrolebinding", "registry-audience") })
	n.Kubectl("create", "serviceaccount", "puller")
	c.Kubelet.Extra = []string{"--image-credential-provider-config=" + config, "--image-credential-provider-bin-dir=" + dir}
	t.Cleanup(func() {
		c.Kubelet.Extra = nil
		if err := c.RestartKubelet(); err != nil {
			t.Error(err)
		}
	})
	if err := c.RestartKubelet(); err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds {
		_, path, _ := strings.Cut(k.web, "/")
		for _, account := range []string{"puller", "default"} {
			n.Apply(strings.NewReplacer("NAME", k.name+"-"+account, "IMAGE", registry+"/"+path, "ACCOUNT", account).Replace(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  runtimeClassName: RUNTIME
  serviceAccountName: ACCOUNT
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: "IMAGE", imagePullPolicy: Always, resources: RESOURCES}]
`)))
		}
	}
	for _, k := range kinds {
		n.WaitPhase(k.name+"-puller", corev1.PodRunning, k.boots)
		waitEvent(n, k.name+"-default", "code = Unauthenticated")
	}
}

// tokenRegistry serves the tests' images to one user, whose password is a token for the audience registry.test. It returns
// its address.
func tokenRegistry(t *testing.T, c *kube.Cluster, user string) string {
	t.Helper()
	images := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: harness.Registry(t).Addr})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, token, _ := r.BasicAuth()
		if holder, err := review(c, token); err != nil || holder != user {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, fmt.Sprintf("%q may not pull (%v)", holder, err), http.StatusUnauthorized)
			return
		}
		r.Header.Del("Authorization")
		images.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	addr := strings.TrimPrefix(server.URL, "http://")
	dir := filepath.Join(c.Dir, "certs.d", addr)
	text := fmt.Sprintf("server = %q\n", server.URL)
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return addr
}

// review asks the API server whose token it is.
func review(c *kube.Cluster, token string) (string, error) {
	if token == "" {
		return "", nil
	}
	question := fmt.Sprintf(`{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": %q, "audiences": ["registry.test"]}}`, token)
	out, err := c.Kubectl(question, "create", "-o", "json", "-f", "-")
	if err != nil {
		return "", err
	}
	var answer authv1.TokenReview
	err = json.Unmarshal([]byte(out), &answer)
	return answer.Status.User.Username, err
}
