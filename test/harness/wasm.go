package harness

import (
	"cmp"
	"testing"
)

// Components of the test registry (examples/wasm and hack/images/components.go).
const (
	wasmPrefix    = ImagePrefix + "tripod/wasm/"
	GreeterC      = wasmPrefix + "greeter-c:1"  // greet.v1.Greeter
	GreeterJS     = wasmPrefix + "greeter-js:1" // the same in JavaScript
	FaultsC       = wasmPrefix + "faults-c:1"   // faults.v1.Faults
	HelloHTTP     = wasmPrefix + "hello-http-c:1"
	FetchC        = wasmPrefix + "fetch-c:1"
	SocketsC      = wasmPrefix + "sockets-c:1"
	CommandGo     = wasmPrefix + "command-go:1"
	WasmRootfs    = wasmPrefix + "rootfs:1"                        // a container image whose entrypoint is command-go
	NamedGreeter  = wasmPrefix + "named:1"                         // named example.com:greet.Greeter@1.0.0 by an annotation
	CalledGreeter = wasmPrefix + "example.com/greet.greeter:1.0.0" // named by its reference
	// Images that a node must refuse.
	MismatchWasm      = wasmPrefix + "mismatch:1"       // greeter-c with the descriptors of faults-c
	UndescribedWasm   = wasmPrefix + "no-descriptors:1" // greeter-c without descriptors
	UnknownImportWasm = wasmPrefix + "unknown-import:1" // imports env#missing
	HugeMemoryWasm    = wasmPrefix + "huge-memory:1"    // declares 4 GiB
	InvalidWasm       = wasmPrefix + "invalid:1"        // is not a component
)

// Wasm configures the handler "wasm" with one worker per "node", "namespace" or "pod".
func Wasm(t testing.TB, worker string) Option {
	t.Helper()
	program, err := WasmBinary()
	if err != nil {
		t.Fatal(err)
	}
	return func(d *Daemon) {
		Set("wasm.program", program)(d)
		Set("wasm.worker", worker)(d)
	}
}

// RunWasm runs a pod with one component and waits until the component has started. The pod is removed when the test
// ends.
func (d *Daemon) RunWasm(t testing.TB, config *PodSpec) *Container {
	t.Helper()
	return d.runSpec(t, config, "wasm")
}

// runSpec runs a pod with one container. The handler is also the pod's default name.
func (d *Daemon) runSpec(t testing.TB, spec *PodSpec, handler string) *Container {
	t.Helper()
	pod := d.RunPodWith(t, PodConfig(t, cmp.Or(spec.Name, handler), spec.Pod...), handler)
	t.Cleanup(pod.Remove)
	return pod.Run(ContainerConfig("c", spec.Image, spec.Container...))
}

// PodSpec describes a pod with one container.
type PodSpec struct {
	Name, Image string
	Pod         []PodOption
	Container   []ContainerOption
}
