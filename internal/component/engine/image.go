package engine

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// Names in WASI that have a special meaning for the engine.
const (
	preview1    = "wasi_snapshot_preview1"
	httpHandler = "wasi:http/incoming-handler@0.2"
	cliRun      = "wasi:cli/run@0.2"
	// messageHandler is a draft, so it has its whole version.
	messageHandler = "wasi:messaging/incoming-handler@0.2.0-draft"
	rawHandler     = "tripod:grpc/handler@0.1"
	rootModule     = "$root" // a core module imports functions without an interface from this module
)

// image is a decoded code image. The encoded form is:
//
//	magic (8 bytes) | SHA-256 of the rest | u32 length, fingerprint | u32 length, inspection (gob) |
//	u32 length, component | u32 length, memory | u32 length, module
//
// Lengths are little-endian. The checksum detects damage, not forgery, so callers must store images where nobody can
// change them.
type image struct {
	inspection
	quick                     bool   // by Config.Quick
	component, memory, module []byte // serialized by wasmtime, and empty if absent
}

const imageMagic = "TRIPODWX"

// quickMark follows the fingerprint in images of quick code.
const quickMark = " quick"

func (i *image) encode() ([]byte, error) {
	var head bytes.Buffer
	if err := gob.NewEncoder(&head).Encode(&i.inspection); err != nil {
		return nil, fmt.Errorf("encode the inspection: %w", err)
	}
	made := Fingerprint()
	if i.quick {
		made += quickMark
	}
	parts := [][]byte{[]byte(made), head.Bytes(), i.component, i.memory, i.module}
	size := 1024
	for _, part := range parts {
		size += len(part)
	}
	out := make([]byte, len(imageMagic)+sha256.Size, size)
	for _, part := range parts {
		out = binary.LittleEndian.AppendUint32(out, uint32(len(part)))
		out = append(out, part...)
	}
	sum := sha256.Sum256(out[len(imageMagic)+sha256.Size:])
	copy(out[copy(out, imageMagic):], sum[:])
	return out, nil
}

func decodeImage(b []byte) (*image, error) {
	head := len(imageMagic) + sha256.Size
	if len(b) < head || !bytes.HasPrefix(b, []byte(imageMagic)) {
		return nil, stale("no magic number at its start")
	}
	if sum := sha256.Sum256(b[head:]); !bytes.Equal(sum[:], b[len(imageMagic):head]) {
		return nil, stale("wrong checksum")
	}
	var parts [][]byte
	for rest := b[head:]; len(rest) > 0 || len(parts) < 5; {
		if len(rest) < 4 || uint64(binary.LittleEndian.Uint32(rest)) > uint64(len(rest)-4) {
			return nil, stale("it is truncated")
		}
		length := binary.LittleEndian.Uint32(rest)
		parts, rest = append(parts, rest[4:4+length]), rest[4+length:]
	}
	made, quick := strings.CutSuffix(string(parts[0]), quickMark)
	if made != Fingerprint() {
		return nil, stale(fmt.Sprintf("it was made by %s, this is %s", made, Fingerprint()))
	}
	i := &image{quick: quick, component: parts[2], memory: parts[3], module: parts[4]}
	if err := gob.NewDecoder(bytes.NewReader(parts[1])).Decode(&i.inspection); err != nil {
		return nil, stale(err.Error())
	}
	return i, nil
}

// Inspected says what the guest in a code image is, and how it is called.
type Inspected struct {
	World World // decides on the Host for Load
	Path  Path
	// WhyComponent and WhyNoSnapshot are what the methods of Code of these names return.
	WhyComponent, WhyNoSnapshot string
}

// Inspect looks at a code image without loading it. If the image is damaged or has another fingerprint, Inspect returns the
// same error as Load.
func Inspect(image []byte) (Inspected, error) {
	img, err := decodeImage(image)
	if err != nil {
		return Inspected{}, err
	}
	return Inspected{img.World, img.path(), img.CoreOdd, img.whyNoSnapshot()}, nil
}

// path returns the path that calls take by default.
func (i *image) path() Path {
	if len(i.module) == 0 {
		return PathComponent
	}
	return PathCore
}

func stale(why string) error {
	return fmt.Errorf("code image: %s; compile the guest again: %w", why, errdefs.ErrFailedPrecondition)
}

// waitingFuncs are the functions of preview 1 in which a guest can wait where no tick reaches it.
var waitingFuncs = []string{"poll_oneoff", "fd_read", "fd_pread", "sock_accept", "sock_recv"}

// describeModule describes a guest that is a core module. An export named INTERFACE#NAME is a function of that interface.
func (i *inspection) describeModule(m wasmbin.Module) {
	i.describeCore(m)
	for _, name := range slices.Sorted(maps.Keys(m.Exports)) {
		if m.Exports[name] != wasmbin.Func || strings.HasPrefix(name, "cabi_post_") {
			continue
		}
		item := Item{Name: name}
		if iface, function, ok := strings.Cut(name, "#"); ok {
			item = Item{Interface: iface, Name: function}
		}
		i.Exports = append(i.Exports, item)
	}
	for _, imp := range m.Imports {
		if resource, ok := strings.CutPrefix(imp.Name, "[resource-drop]"); ok && imp.Module != preview1 {
			i.Resources = append(i.Resources, resourceItem{imp.Module, resource, compatName(imp.Module) + "#" + resource})
			continue
		}
		i.Imports = append(i.Imports, Item{Interface: imp.Module, Name: imp.Name})
	}
}

func (i *inspection) describeCore(m wasmbin.Module) {
	for _, imp := range m.Imports {
		if imp.Module == preview1 {
			i.CoreWASI = true
			i.CoreWaits = i.CoreWaits || slices.Contains(waitingFuncs, imp.Name)
		}
	}
}

// exports reports whether the guest exports a function of that full name.
func (i *inspection) exports(name string) bool {
	return slices.ContainsFunc(i.Exports, func(x Item) bool { return x.String() == name })
}

// findCore determines whether the component can be called through its core modules: preferably through the first alone,
// otherwise by the plan, which makes one module of all.
func (i *inspection) findCore(bin *wasmbin.Binary, plan planned, opts CompileOptions) {
	if !opts.plan && coreImports(bin, opts.Provided) == "" && i.named(bin.Modules[0]) && i.coreExports(bin) == "" {
		i.describeCore(bin.Modules[0])
		i.Start = i.World == WorldCommand && len(bin.Lifted) == 0
		return
	}
	if i.CoreOdd = plan.odd; i.CoreOdd != "" {
		return
	}
	i.Plan = &wasmbin.Plan{Imports: plan.Imports, Exports: plan.Exports} // without the module
	i.CoreOdd = i.planExports()
}

// named reports whether each import of a core module has the name of a function of preview 1, or of a function or resource
// that the component imports. Tools can give an import another name, such as "fd_write [v2]" for a second import of
// fd_write, or another version.
func (i *inspection) named(m wasmbin.Module) bool {
	for _, imp := range m.Imports {
		iface := imp.Module
		if iface == rootModule {
			iface = ""
		}
		resource, drop := strings.CutPrefix(imp.Name, "[resource-drop]")
		switch {
		case iface == preview1:
			if !slices.Contains(preview1Funcs(), imp.Name) {
				return false
			}
		case drop:
			if !slices.ContainsFunc(i.Resources, func(r resourceItem) bool { return r.Interface == iface && r.Name == resource }) {
				return false
			}
		case !slices.ContainsFunc(i.Imports, func(item Item) bool { return item.Interface == iface && item.Name == imp.Name }):
			return false
		}
	}
	return true
}

// coreImports returns why the first core module alone is no core path, as far as the component's shape and the module's
// imports tell, or "".
func coreImports(bin *wasmbin.Binary, host func(string) bool) string {
	if odd := coreShape(bin); odd != "" {
		return odd
	}
	var both [2]bool // preview 1, and interfaces of WASI 0.2 that share what it uses
	for _, imp := range bin.Modules[0].Imports {
		iface := imp.Module
		if iface == rootModule {
			iface = ""
		}
		if iface == preview1 {
			both[0] = true
			continue
		}
		if host == nil || !host(iface) {
			return fmt.Sprintf("the core module imports %s, which only the component path provides", imp.Module)
		}
		both[1] = both[1] || strings.HasPrefix(iface, "wasi:cli/") || strings.HasPrefix(iface, "wasi:filesystem/")
	}
	if both[0] && both[1] {
		return "the core module uses both preview 1 and WASI 0.2 for standard streams or files"
	}
	return ""
}

// checkImports returns an error that names the imports that neither WASI nor the host provides, or nil.
func (i *inspection) checkImports(host func(string) bool) error {
	var missing []string
	for _, item := range i.Imports {
		if !engineProvides(item.Interface) && (host == nil || !host(item.Interface)) {
			missing = append(missing, item.String())
		}
	}
	if len(missing) == 0 {
		return nil
	}
	more := ""
	if len(missing) > 5 {
		more = fmt.Sprintf(" and %d more", len(missing)-5)
	}
	return invalid("import %s%s: nothing provides it", strings.Join(missing[:min(len(missing), 5)], ", "), more)
}

// coreExports returns why the component's functions cannot be called through its core module, or "" if they can.
func (i *inspection) coreExports(bin *wasmbin.Binary) string {
	m := bin.Modules[0]
	// A preview 1 command has _start, but the component lifts no function of this core module: it lifts a function of the
	// preview 1 adapter, which calls _start.
	if i.World == WorldCommand && len(bin.Lifted) == 0 && m.HasExport("_start", wasmbin.Func) {
		return ""
	}
	if len(bin.Foreign) > 0 {
		return fmt.Sprintf("the function %s does not belong to the first core module", bin.Foreign[0])
	}
	if !m.HasExport("memory", wasmbin.Memory) {
		return "the core module exports no memory"
	}
	for _, item := range i.Exports {
		if !m.HasExport(item.String(), wasmbin.Func) || !bin.Lifted[item.String()] {
			return fmt.Sprintf("the core module does not export %v", item)
		}
	}
	return ""
}

// normalizedTypes applies normalized to the types of a function.
func normalizedTypes(params []*wit.Type, result *wit.Type) ([]*wit.Type, *wit.Type) {
	seen := make(map[*wit.Type]*wit.Type)
	all := make([]*wit.Type, len(params))
	for i, p := range params {
		all[i] = normalized(p, seen)
	}
	return all, normalized(result, seen)
}

// normalized returns a copy of t. In the copy, [compatName] has shortened the names of resources, so that compatible
// versions compare equal.
func normalized(t *wit.Type, seen map[*wit.Type]*wit.Type) *wit.Type {
	if t == nil {
		return nil
	}
	if out, ok := seen[t]; ok {
		return out
	}
	out := *t
	seen[t] = &out
	if t.Kind == wit.Own || t.Kind == wit.Borrow {
		out.Name = resourceName(t.Name)
	}
	out.Elem, out.Ok, out.Err = normalized(t.Elem, seen), normalized(t.Ok, seen), normalized(t.Err, seen)
	out.Fields = slices.Clone(t.Fields)
	for k := range out.Fields {
		out.Fields[k].Type = normalized(t.Fields[k].Type, seen)
	}
	out.Cases = slices.Clone(t.Cases)
	for k := range out.Cases {
		out.Cases[k].Type = normalized(t.Cases[k].Type, seen)
	}
	return &out
}

func resourceName(full string) string {
	iface, name, ok := strings.Cut(full, "#")
	if !ok {
		return full
	}
	return compatName(iface) + "#" + name
}
