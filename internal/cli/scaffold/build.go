package scaffold

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// componentFile is the component that a build makes in its directory.
const componentFile = "component.wasm"

// Built is a component that was built from a directory.
type Built struct {
	Wasm []byte
	// Source has the descriptors of the directory's .proto files.
	Source *protosource.Result
	// Services are the full names of what it serves.
	Services []string
}

// builder builds the directories of one language.
type builder struct {
	// services returns the full names of what the component serves.
	services func(dir string) ([]string, error)
	// build makes componentFile.
	build func(ctx context.Context, dir string, source *protosource.Result, services []string, progress io.Writer) error
}

// builderOf returns nil for a directory in another language than C, JavaScript, Python or Rust.
func builderOf(dir string) *builder {
	switch {
	case isJavaScript(dir):
		return &builder{packageServices, func(ctx context.Context, dir string, _ *protosource.Result, _ []string, _ io.Writer) error {
			return buildJS(ctx, dir)
		}}
	case isPython(dir):
		return &builder{pythonServices, func(ctx context.Context, dir string, source *protosource.Result, services []string, _ io.Writer) error {
			return buildPython(ctx, dir, source, services)
		}}
	case isC(dir):
		return &builder{inC.services, buildC}
	case isRust(dir):
		return &builder{inRust.services, buildRust}
	default:
		return nil
	}
}

// CanBuild reports whether Build builds a directory: a component in C, JavaScript, Python or Rust.
func CanBuild(dir string) bool { return builderOf(dir) != nil }

// Build builds the component of a directory, and writes what takes long to progress. It returns errdefs.ErrInvalidArgument with
// the build's output if that fails, or if the directory does not say what the component serves, and errdefs.ErrUnavailable if
// there is no toolchain.
func Build(ctx context.Context, dir string, progress io.Writer) (*Built, error) {
	b := builderOf(dir)
	services, err := b.services(dir)
	if err != nil {
		return nil, err
	}
	source, err := compileProtos(ctx, dir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, componentFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // of another build
		return nil, err
	}
	if err := b.build(ctx, dir, source, services, progress); err != nil {
		return nil, err
	}
	wasm, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the build of %s made no component: %w", dir, err)
	}
	return &Built{Wasm: wasm, Source: source, Services: services}, nil
}

// readServices returns the services that a file names, as in the example. It returns errdefs.ErrInvalidArgument if decode
// fails or finds none.
func readServices(path, example string, decode func(text []byte) ([]string, error)) ([]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	services, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, err, errdefs.ErrInvalidArgument)
	}
	if len(services) == 0 {
		return nil, fmt.Errorf("%s does not say what the component serves (%s): %w", path, example, errdefs.ErrInvalidArgument)
	}
	return services, nil
}
