package sandbox

import "time"

// CompilationState is the state of the machine code of an image's component on this node.
type CompilationState string

const (
	// CompilationNone: there is no code, and nothing compiles it. The next pod that needs it does.
	CompilationNone CompilationState = "none"
	// CompilationQueued: it waits for other compilations, or the code in its image is being checked.
	CompilationQueued CompilationState = "queued"
	// CompilationRunning: it is being compiled.
	CompilationRunning CompilationState = "compiling"
	// CompilationDone: pods start without compiling it. The code can also be from the image; see Compilation.Key.
	CompilationDone CompilationState = "compiled"
	// CompilationFailed: see Compilation.Reason. Pods that need it fail with the same reason.
	CompilationFailed CompilationState = "failed"
)

// Compilation describes the compilation, or the code, of an image's component.
type Compilation struct {
	// ImageID is the image, and Image is one of its references, or the ID if it has none.
	ImageID string `json:"-"`
	Image   string `json:"-"`

	State CompilationState `json:"state"`
	// Reason says why it failed.
	Reason string `json:"reason,omitempty"`
	// Took is the duration without the time in the queue; zero if it did not end, or ended before the daemon started.
	Took time.Duration `json:"took,omitempty"`
	// Key is the fingerprint of the key that has signed the code, if the code is from a layer of an image and was not compiled
	// here. LayerRefused says why this node does not use the code in the image.
	Key          string `json:"key,omitempty"`
	LayerRefused string `json:"layerRefused,omitempty"`
}
