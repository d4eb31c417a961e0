// Package kubeadm runs the files and the commands of docs/kubeadm.md with the real kubeadm (hack/kube.sh build kubeadm), as
// far as they need neither systemd nor images of a control plane. `make test-kubelet` runs it.
package kubeadm
