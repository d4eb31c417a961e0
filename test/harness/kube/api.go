package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

// client returns an HTTP client for the API server. A test that waits reads the API often, and kubectl would be a
// hundred times slower.
func (i identity) client() *http.Client {
	return &http.Client{
		Timeout:   30 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: i.pool}, MaxIdleConnsPerHost: 8},
	}
}

// read reads a path of the API as the administrator.
func (c *Cluster) read(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, serverURL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer admin")
	resp, err := c.api.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return body, err
}

// Get reads an object or a list from the API.
func (c *Cluster) Get(path string, into any) error {
	body, err := c.read(context.Background(), path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, into)
}

// KubectlCommand returns a command, not started yet, that runs kubectl as the administrator.
func (c *Cluster) KubectlCommand(args ...string) *exec.Cmd {
	return exec.Command(c.programs+"/kubectl", append([]string{"--kubeconfig", c.Kubeconfig()}, args...)...)
}

// Kubeconfig returns the path of the administrator's kubeconfig.
func (c *Cluster) Kubeconfig() string { return c.identity.kubeconfig("admin") }

// Kubectl runs kubectl and returns its output; the error contains its standard error.
func (c *Cluster) Kubectl(stdin string, args ...string) (string, error) {
	k := c.KubectlCommand(args...)
	k.Stdin = strings.NewReader(stdin)
	return output(k)
}

// Sandbox is a pod as Tripod lists it.
type Sandbox struct {
	Metadata struct{ Name, Namespace string }
	State    string
}

// Sandboxes returns the pods of the node's daemon, including those that have ended.
func (n *Node) Sandboxes() ([]Sandbox, error) {
	out, err := n.Tripod("pods", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct{ Items []Sandbox }
	err = json.Unmarshal([]byte(out), &list)
	return list.Items, err
}

func output(cmd *exec.Cmd) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return string(out), err
}

// applyRuntimeClasses applies the RuntimeClasses that the documents tell a cluster's administrator to apply.
func (c *Cluster) applyRuntimeClasses() error {
	_, err := c.Kubectl("", "apply", "-f", filepath.Join(harness.Root(), "contrib/kubernetes/runtimeclasses.yaml"))
	return err
}
