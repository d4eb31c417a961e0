#!/bin/bash
# generate.sh [DIR]: writes testdata with the kubelet's own code. DIR is a module that pins k8s.io/kubernetes; the default is hack/kube.
# It copies the packages kuberuntime and kubelet and adds a file to each, because the functions that write the messages are not exported.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kube=$(cd "${1:-$here/../../../../hack/kube}" && pwd)
src=$(go list -C "$kube" -mod=mod -m -f '{{.Dir}}' k8s.io/kubernetes)/pkg/kubelet
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/kuberuntime" "$work/kubelet" "$work/out"
cp "$kube/go.mod" "$kube/go.sum" "$work"
cp "$src"/kuberuntime/*.go "$work/kuberuntime"
cp "$src"/*.go "$work/kubelet"
cp "$here/kuberuntime.go.txt" "$work/kuberuntime/corpus.go"
cp "$here/kubelet_test.go.txt" "$work/kubelet/corpus_test.go"
chmod -R u+w "$work"
rm "$work"/kuberuntime/*_test.go
sed -i 's#"k8s.io/kubernetes/pkg/kubelet/kuberuntime"#"generate/kuberuntime"#' "$work"/kubelet/*.go
cd "$work"
go mod edit -module generate
CGO_ENABLED=0 CORPUS_PODS="$here/../pods.yaml" CORPUS_OUT="$work/out" \
	go test -mod=mod -trimpath -vet=off -count=1 -run '^TestCorpus$' ./kubelet
rm -f "$here"/../testdata/*.json
cp out/*.json "$here/../testdata"
