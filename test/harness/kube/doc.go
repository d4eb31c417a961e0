// Package kube runs a Kubernetes cluster of one node with a real tripod daemon as its runtime, in the namespaces that
// test/harness/testns creates. Tests use the cluster as users do: through kubectl and the API.
//
// It owns the programs of the cluster and the environment of the node. It must not know what a test checks: the tests
// are in test/kubelet, and hack/kubenode runs a cluster for manual use. Begin with Start.
//
//	etcd ◀── kube-apiserver ◀── kube-controller-manager, kube-scheduler, kube-proxy, kubectl
//	              ▲                                            │ iptables: ClusterIP, NodePort
//	              ▼                                            ▼
//	           kubelet ──▶ /run/tripod/tripod.sock ◀── tripod daemon ──▶ registry on loopback
//
// The programs come from Kubernetes' own module (hack/kube.sh builds them); etcd is Debian's. If the kubelet ends, it
// is restarted, as by a service manager, because a kubelet ends by itself when it finds no runtime. If any other
// program ends unexpectedly, Stop returns an error.
package kube
