package wasm

import (
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
)

// WorkerMode says which pods share a worker process.
type WorkerMode string

// The modes.
const (
	WorkerPerNode      WorkerMode = "node"
	WorkerPerNamespace WorkerMode = "namespace"
	WorkerPerPod       WorkerMode = "pod"
)

// scopeNode is the scope of all pods of the node.
const scopeNode = "node"

// scopeOf returns the scope of a pod according to the worker mode. A scope is a set of pods that share a worker.
func (c Config) scopeOf(p *sandbox.Pod) string {
	switch c.Workers {
	case WorkerPerNamespace:
		return "ns-" + keyOf(p.Config.GetMetadata().GetNamespace())[:32]
	case WorkerPerPod:
		return ownScope(p.ID)
	default:
		return scopeNode
	}
}

// ownScope returns the scope of a pod with its own worker, or of a foreign container.
func ownScope(id string) string { return workers.OwnScope(keyOf(id)) }
