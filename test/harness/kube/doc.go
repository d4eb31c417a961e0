// Package kube runs a Kubernetes cluster of one node whose runtime is a real tripod daemon, in the world that
// test/harness/testns makes, and drives it as its users do: by kubectl, and by reading the API.
//
// It owns the programs of the cluster and what the node needs around them. It must not know what a test wants to
// find out; test/kubelet has the tests, hack/kubenode keeps a cluster for a person. Begin with Start.
//
//	etcd ◀── kube-apiserver ◀── kube-controller-manager, kube-scheduler, kube-proxy, kubectl
//	              ▲                                            │ iptables: ClusterIP, NodePort
//	              ▼                                            ▼
//	           kubelet ──▶ /run/tripod/tripod.sock ◀── tripod daemon ──▶ registry on loopback
//
// The programs come from Kubernetes' own module (hack/kube.sh builds them), etcd is Debian's. A kubelet that ends is
// started again, as a service manager would: it ends by itself when it finds no runtime. Every other program that
// ends without having been told to is an error of Stop.
package kube
