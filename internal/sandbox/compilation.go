package sandbox

import "time"

// CompilationState is the state of the machine code of an image's component on this node.
type CompilationState string

const (
	// CompilationNone: there is no code, and nothing compiles it. The next pod that needs it does.
	CompilationNone CompilationState = "none"
	// CompilationQueued: it waits for other compilations.
	CompilationQueued CompilationState = "queued"
	// CompilationRunning: it is being compiled.
	CompilationRunning CompilationState = "compiling"
	// CompilationDone: pods start without compiling it.
	CompilationDone CompilationState = "compiled"
	// CompilationFailed: see Compilation.Reason. Pods that need it fail with the same reason.
	CompilationFailed CompilationState = "failed"
)

// Compilation describes the compilation of an image's component.
type Compilation struct {
	// ImageID is the image, and Image is one of its references, or the ID if it has none.
	ImageID string `json:"-"`
	Image   string `json:"-"`

	State CompilationState `json:"state"`
	// Reason says why it failed.
	Reason string `json:"reason,omitempty"`
	// Took is the duration without the time in the queue; zero if it did not end, or ended before the daemon started.
	Took time.Duration `json:"took,omitempty"`
}
