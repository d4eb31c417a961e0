// Package e2enode runs the public end-to-end specs of Kubernetes that are about a node, against the cluster of
// test/harness/kube. It owns which specs these are and how many run at once; which of them fail, and why, is a table of
// docs/conformance.md, which the test reads.
//
// The specs are Kubernetes' own program e2e.test, run by ginkgo; hack/kube.sh builds both and the image agnhost, which most
// of them run. Begin reading with TestSpecs. What a spec finds out about Tripod becomes a test of test/e2e or test/kubelet.
package e2enode
