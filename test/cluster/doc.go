// Package cluster tests two nodes with a real Kubernetes: each node has its own namespaces, daemon, kubelet and
// kube-proxy, flannel connects them, and CoreDNS runs in a pod (test/harness/kube).
//
// It tests what needs a second node. What one node does is in test/kubelet. Begin reading with nodes_test.go.
package cluster
