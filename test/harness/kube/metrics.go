package kube

import (
	_ "embed"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	metricsServer = "metrics-server" // the program, its user, its certificate and its Service
	metricsPort   = "4443"
)

// metricsObjects are what metrics-server needs in the cluster: its roles, and a Service for a process outside of pods.
//
//go:embed metrics.yaml
var metricsObjects string

// metricsAPI makes the API server forward an API to metrics-server, to fill in with the authority's certificate.
const metricsAPI = `
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.metrics.k8s.io}
spec:
  group: metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  service: {name: metrics-server, namespace: kube-system}
  caBundle: %s
`

// StartMetricsServer runs metrics-server on the first node until the test ends, and returns when the API server serves
// its API, which `kubectl top` reads.
func (c *Cluster) StartMetricsServer(t testing.TB) error {
	programs, err1 := Programs("metrics")
	authority, err2 := os.ReadFile(c.identity.path("ca.crt"))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	p := c.program(metricsServer, c.config(metricsServer), "--authentication-kubeconfig="+c.identity.kubeconfig(metricsServer),
		"--authorization-kubeconfig="+c.identity.kubeconfig(metricsServer), "--secure-port="+metricsPort,
		"--tls-cert-file="+c.identity.path(metricsServer+".crt"), "--tls-private-key-file="+c.identity.path(metricsServer+".key"),
		"--kubelet-preferred-address-types=InternalIP", "--kubelet-insecure-tls", // the kubelet has signed its certificate itself
		"--metric-resolution=10s", "--kubelet-request-timeout=9s") // the shortest interval; a request must end within it
	p.argv[0] = filepath.Join(programs, metricsServer)
	objects := strings.NewReplacer("PORT", metricsPort, "ADDRESS", NodeIP).Replace(metricsObjects)
	api := fmt.Sprintf(metricsAPI, base64.StdEncoding.EncodeToString(authority))
	t.Cleanup(func() {
		// Without its server, the API would hold up the deletion of namespaces.
		_, err := c.Kubectl(api+"---\n"+objects, "delete", "--ignore-not-found", "-f", "-")
		if err := errors.Join(err, p.Stop()); err != nil {
			t.Errorf("stop %s: %v", metricsServer, err)
		}
		for _, end := range p.failures() {
			t.Errorf("%s\n%s", end, p.Tail(30))
		}
	})
	if _, err := c.Kubectl(objects, "apply", "-f", "-"); err != nil {
		return err
	}
	if err := errors.Join(p.Start(), c.await(p, "has figures", c.metricsReady)); err != nil {
		return err
	}
	if _, err := c.Kubectl(api, "apply", "-f", "-"); err != nil {
		return err
	}
	_, err := c.Kubectl("", "wait", "--for=condition=Available", "--timeout="+readyTimeout.String(), "apiservice/v1beta1.metrics.k8s.io")
	return err
}

// metricsReady returns nil if metrics-server has the figures of two points in time, which it needs for the use of CPU.
func (c *Cluster) metricsReady() error {
	resp, err := c.api.Get("https://" + NodeIP + ":" + metricsPort + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}
