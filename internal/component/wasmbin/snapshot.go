package wasmbin

import (
	"bytes"
	"fmt"
	"slices"
)

// snapshotPrepare is the function that a guest exports if its instances can begin from a snapshot (sdk/wit).
const snapshotPrepare = "tripod:grpc/snapshot@0.1.0#prepare"

// The tools that InitializedBy knows.
const (
	ComponentizeQJS = "componentize-qjs"
	ComponentizeJS  = "ComponentizeJS"
)

// builders are tools that initialize a guest when they build it, with bytes that are part of all that they build.
var builders = []struct{ tool, mark string }{{ComponentizeQJS, "componentize_qjs"}, {ComponentizeJS, "StarlingMonkey"}}

// InitializedBy returns the tool that has run the guest's initialization when it built the binary, or "" if none is known.
// An instance of such a guest begins in the state after the initialization.
func InitializedBy(binary []byte) string {
	for _, b := range builders {
		if bytes.Contains(binary, []byte(b.mark)) {
			return b.tool
		}
	}
	return ""
}

// WhyNoSnapshot returns why instances of a guest with the given core modules cannot begin from a snapshot, as far as the
// names in the binary show it, or "".
func WhyNoSnapshot(binary []byte, modules []Module) string {
	if slices.ContainsFunc(modules, func(m Module) bool { return m.HasExport(snapshotPrepare, Func) }) {
		return ""
	}
	if tool := InitializedBy(binary); tool != "" {
		return fmt.Sprintf("%s initialized the guest when it was built", tool)
	}
	return fmt.Sprintf("the guest does not export %s", snapshotPrepare)
}
