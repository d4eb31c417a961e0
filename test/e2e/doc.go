// Package e2e makes calls to a real daemon through its CRI socket, as a kubelet does, and checks the effects from
// inside the containers and from outside. It runs in the namespaces that hack/testns.sh creates.
//
// Each file covers one area. suite_test.go runs the suite of all backends (test/sandboxtest) with real containers.
package e2e
