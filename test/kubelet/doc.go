// Package kubelet has the tests of Tripod under a real Kubernetes: kubelet, API server, controllers, scheduler, kube-proxy
// and kubectl, as test/harness/kube starts them. One cluster is for all tests, each test has a namespace of its own.
//
// Tests say what a user of the cluster sees. What the kubelet asks for, call by call, is modelled in test/e2e; a
// difference that a test here finds becomes a case of the model. Begin reading with kinds_test.go: most tests are tables
// over the kinds of pods.
//
// Tests run beside each other unless they do something to the node; these do not call t.Parallel, and run before all that
// do.
package kubelet
