// Module critest pins the conformance suite of the CRI, apart from the modules that are in the product.
module github.com/tripod-run/tripod/hack/critest

go 1.26.6

tool sigs.k8s.io/cri-tools/cmd/critest

require sigs.k8s.io/cri-tools v1.37.0 // indirect
