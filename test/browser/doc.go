// Package browser tests component pods as web pages, gateways and kubelets reach them: a page in Chromium calls pods from
// another origin, nginx and haproxy forward to them with the configurations of examples/wasm/ingress, and the probes are
// those of Kubernetes' own packages.
//
// make test-browser builds the page (page, with pinned npm packages) and the prober (hack/kube/probe). Begin reading with
// TestPage, TestGateways and TestProbes.
package browser
