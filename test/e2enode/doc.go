// Package e2enode runs Kubernetes' public end-to-end specs for nodes against the cluster of test/harness/kube. It
// selects the specs and sets how many run in parallel. A table in docs/conformance.md, which the test reads, lists
// the specs that fail, and why.
//
// Ginkgo runs the specs, which are in Kubernetes' program e2e.test. hack/kube.sh builds Ginkgo, e2e.test and the image
// agnhost, which most specs run. Begin reading with TestSpecs. If a spec finds a bug in Tripod, a test for it goes into
// test/e2e or test/kubelet.
package e2enode
