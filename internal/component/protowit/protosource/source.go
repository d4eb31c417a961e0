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

// Result is what files were compiled to.
type Result struct {
	// Set holds the files and all that they import (the well-known types too), imported ones first, with the comments of
	// the source.
	Set *descriptorpb.FileDescriptorSet
	// Services are the full names of those that the files themselves declare, in their order.
	Services []string
}

// Compile reads files. Imports are looked for in the import paths, in their order, like protoc's -I does; without any
// they are looked for in the directory of each file. google/protobuf/*.proto are built in.
//
// A file or import that cannot be found is errdefs.ErrNotFound, one that does not compile errdefs.ErrInvalidArgument with
// file, line and column of every mistake.
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

// locate finds the names that the compiler shall know the files by: relative to an import path that holds them.
func locate(files, importPaths []string) (names, paths []string, err error) {
	paths = append(paths, importPaths...)
	for _, file := range files {
		if len(importPaths) == 0 {
			names = append(names, filepath.Base(file))
			paths = append(paths, filepath.Dir(file))
			continue
		}
		name, ok := below(file, importPaths)
		if !ok {
			return nil, nil, fmt.Errorf("%s is in none of the import paths %s (-I): %w", file,
				strings.Join(importPaths, ", "), errdefs.ErrInvalidArgument)
		}
		names = append(names, name)
	}
	return names, paths, nil
}

// below is the name of the file under the first import path that holds it.
func below(file string, importPaths []string) (string, bool) {
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
