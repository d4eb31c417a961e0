package engine

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// checkDeclared checks the memories and tables that a module declares against the limits.
func checkDeclared(m wasmbin.Module, cfg Config) error {
	if n := len(m.Memories); n > 1 {
		return invalid("%s has %d memories, limit 1", titleOf(m), n)
	}
	for _, l := range m.Memories {
		if size := l.Min * l.PageSize; l.Min > 1<<32 || size > cfg.MaxMemory {
			return invalid("%s declares %s of memory, limit %s", titleOf(m), inBytes(size), inBytes(cfg.MaxMemory))
		}
	}
	if n := len(m.Tables); n > maxTables {
		return invalid("%s has %d tables, limit %d", titleOf(m), n, maxTables)
	}
	for _, l := range m.Tables {
		if l.Min > uint64(cfg.MaxTableElements) {
			return invalid("%s declares a table of %d elements, limit %d", titleOf(m), l.Min, cfg.MaxTableElements)
		}
	}
	return checkInstanceSize(titleOf(m)+" needs", instanceSize(m))
}

// checkInstanceSize returns an error, which begins with what, if instances are too large.
func checkInstanceSize(what string, size uint64) error {
	if size > maxInstanceSize {
		return invalid("%s %s in each instance, beside its memory, limit %s", what, inBytes(size), inBytes(maxInstanceSize))
	}
	return nil
}

const (
	maxTables = 8 // of a core module
	// maxInstanceSize bounds instanceSize. A Go program of 100 MB has 200 000 functions.
	maxInstanceSize = 8 << 20
	// freeInstanceSize is the part of instanceSize that is not charged to a pod, because ordinary guests need less.
	freeInstanceSize = 64 << 10
)

// instanceSize estimates the host's memory for an instance of a module, in bytes, beside its memory and its tables: wasmtime
// keeps 32 bytes for each function to which the module refers (here all), 16 for each global and for each element of a passive
// segment, 12 for each data segment, and a few objects for each import.
func instanceSize(m wasmbin.Module) uint64 {
	return 32*uint64(m.Functions) + 16*(uint64(m.Globals)+m.Elements) + 12*uint64(m.Segments) + 128*uint64(len(m.Imports))
}

func titleOf(m wasmbin.Module) string {
	if m.Name != "" {
		return fmt.Sprintf("core module %q", m.Name)
	}
	return "the core module"
}

// minMemory returns the total initial size of the memories that a module defines, in bytes.
func minMemory(m wasmbin.Module) (sum uint64) {
	for _, l := range m.Memories {
		sum += l.Min * l.PageSize
	}
	return sum
}

func inBytes(n uint64) string {
	switch {
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// coreShape returns why the binary cannot take the core path, or "" if it can.
func coreShape(b *wasmbin.Binary) string {
	if !b.Component || b.Unsupported != "" {
		return b.Unsupported
	}
	if len(b.Modules) == 0 {
		return "the component has no core module of its own"
	}
	if len(b.Nested) > 0 {
		return "a nested component has core modules"
	}
	for _, i := range b.Modules[0].Imports {
		if i.Kind != wasmbin.Func {
			return fmt.Sprintf("the core module imports %s.%s, which is not a function", i.Module, i.Name)
		}
		if strings.HasPrefix(i.Module, "[export]") {
			return "the guest defines resources"
		}
	}
	return ""
}
