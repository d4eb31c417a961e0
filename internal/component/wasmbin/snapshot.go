package wasmbin

import (
	"bytes"
	"fmt"
	"slices"
)

// snapshotExports are the functions of which a guest exports at least one if its instances can begin from a snapshot (sdk/wit).
var snapshotExports = []string{"tripod:grpc/snapshot@0.1.0#prepare", "tripod:grpc/warm@0.1.0#warm"}

// The tools that InitializedBy knows.
const (
	ComponentizeQJS = "componentize-qjs"
	ComponentizeJS  = "ComponentizeJS"
	ComponentizePy  = "componentize-py"
)

// builders are tools that initialize a guest when they build it, with bytes that are part of all that they build.
var builders = []struct{ tool, mark string }{
	{ComponentizeQJS, "componentize_qjs"}, {ComponentizeJS, "StarlingMonkey"}, {ComponentizePy, "componentize_py_runtime"},
}

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

// WhyNoSnapshot returns why instances of a guest cannot begin from a snapshot, as far as its binary and its exported functions
// show it, or "".
func WhyNoSnapshot(binary []byte, exports func(name string) bool) string {
	if slices.ContainsFunc(snapshotExports, exports) {
		return ""
	}
	if tool := InitializedBy(binary); tool != "" {
		return fmt.Sprintf("%s initialized the guest when it was built", tool)
	}
	return "the guest does not export " + snapshotExports[0]
}
