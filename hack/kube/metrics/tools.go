//go:build tools

// Package tools imports the program that hack/kube.sh builds, so that go mod tidy keeps it.
package tools

import _ "sigs.k8s.io/metrics-server/cmd/metrics-server"
