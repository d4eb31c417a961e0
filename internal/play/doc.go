// Package play translates Kubernetes manifests into the calls that a node needs, where no API server and no kubelet do.
//
// It owns what a manifest means on a node alone: which fields of a v1 Pod have an effect and which have none (fields.go), and
// the CRI messages that they become. The plan names the fields without an effect for a warning. A field that is in neither
// table is refused by its path before anything is made, so nothing is ignored silently, nor are fields that a later version
// of the API adds.
//
//	bytes ──Parse──▶ Manifests ──Plan──▶ []*Pod: messages, the order of the containers, what each volume contains
//	                                       └── files.go: makes and removes the volumes' files
//
// Parse and Plan neither read nor change the node. The caller makes the CRI calls; internal/cli does so for `tripod run
// -f`. The package must not know a kind of pod, nor import any other package of ours. Begin reading at plan.go.
package play
