// Package e2e drives a real daemon through its CRI socket, as a kubelet would, and looks at what comes of it from
// inside the containers and from outside. It runs in the namespaces that hack/testns.sh makes.
//
// Each file covers one area; suite_test.go runs the suite of all backends (test/sandboxtest) over real containers.
package e2e
