// Package kubelet tests Tripod with a real Kubernetes: kubelet, API server, controllers, scheduler, kube-proxy and
// kubectl, which test/harness/kube starts. All tests share one cluster; each test has its own namespace.
//
// The tests check what a user of the cluster sees. test/e2e has a model of the kubelet's calls; if a test here finds a
// difference, a case is added to the model. Begin reading with kinds_test.go: most tests are tables over the kinds of
// pods.
//
// Tests run in parallel unless they affect the node. Tests that affect the node do not call t.Parallel, and run before
// the others.
package kubelet
