package protosource

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	"github.com/bufbuild/protocompile/protoutil"
	"github.com/bufbuild/protocompile/reporter"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Result is the output of Compile.
type Result struct {
	// Set contains the files and all their imports, including well-known types. Imports come first. Set includes the
	// comments of the sources.
	Set *descriptorpb.FileDescriptorSet
	// Services are the full names of the services that the files declare, in order. The services of imports are not
	// included.
	Services []string
}

// Compile compiles .proto files. It searches the import paths in order, like protoc's -I. Without import paths, it
// searches the directory of each file. The files google/protobuf/*.proto are built in.
//
// Compile returns errdefs.ErrNotFound for a file or import that does not exist. For files that do not compile, it
// returns errdefs.ErrInvalidArgument with the file, line and column of every mistake.
func Compile(ctx context.Context, files, importPaths []string) (*Result, error) {
	names, paths, err := locate(files, importPaths)
	if err != nil {
		return nil, err
	}
	var mistakes []error
	c := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: paths}),
		SourceInfoMode: protocompile.SourceInfoStandard,
		Reporter: reporter.NewReporter(func(err reporter.ErrorWithPos) error {
			mistakes = append(mistakes, err)
			return nil
		}, nil),
	}
	linked, err := c.Compile(ctx, names...)
	switch {
	case len(mistakes) > 0:
		return nil, fmt.Errorf("%w: %w", errors.Join(mistakes...), errdefs.ErrInvalidArgument)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return collect(linked), nil
}

// locate returns the names of the files for the compiler, and the paths that the compiler searches. Each name is
// relative to one of these paths.
func locate(files, importPaths []string) (names, paths []string, err error) {
	paths = append(paths, importPaths...)
	for _, file := range files {
		if len(importPaths) == 0 {
			names = append(names, filepath.Base(file))
			paths = append(paths, filepath.Dir(file))
			continue
		}
		name, ok := relative(file, importPaths)
		if !ok {
			return nil, nil, fmt.Errorf("%s is in none of the import paths %s (-I): %w", file,
				strings.Join(importPaths, ", "), errdefs.ErrInvalidArgument)
		}
		names = append(names, name)
	}
	return names, paths, nil
}

// relative returns the file's name relative to the first import path that contains the file.
func relative(file string, importPaths []string) (string, bool) {
	abs, err := filepath.Abs(file)
	if err != nil {
		return "", false
	}
	for _, p := range importPaths {
		dir, err := filepath.Abs(p)
		if err != nil {
			continue
		}
		if rel, err := filepath.Rel(dir, abs); err == nil && filepath.IsLocal(rel) {
			return filepath.ToSlash(rel), true
		}
	}
	return "", false
}

func collect(files linker.Files) *Result {
	r := &Result{Set: &descriptorpb.FileDescriptorSet{}}
	seen := make(map[string]bool)
	for _, f := range files {
		add(r.Set, f, seen)
		for i := range f.Services().Len() {
			r.Services = append(r.Services, string(f.Services().Get(i).FullName()))
		}
	}
	return r
}

func add(set *descriptorpb.FileDescriptorSet, f protoreflect.FileDescriptor, seen map[string]bool) {
	if seen[f.Path()] {
		return
	}
	seen[f.Path()] = true
	for i := range f.Imports().Len() {
		add(set, f.Imports().Get(i).FileDescriptor, seen)
	}
	set.File = append(set.File, protoutil.ProtoFromFileDescriptor(f))
}
