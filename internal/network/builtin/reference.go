package builtin

import (
	"debug/buildinfo"
	"os"
	"strings"
	"sync"
	"time"
)

// references finds out which executables are builds of the reference plugins, and caches the answers. Executables built
// by Go 1.18 or later contain the path of their main package.
type references struct {
	mu   sync.Mutex
	seen map[string]executable
}

// executable is the cached answer for a file. It is valid until the file's modification time or size changes.
type executable struct {
	modified time.Time
	size     int64
	main     string // path of the main package
}

const referenceModule = "github.com/containernetworking/plugins/plugins/"

// match reports whether the executable at path is the reference plugin with the given name. The main package of such a
// plugin is KIND/NAME in referenceModule.
func (r *references) match(path, name string) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.seen[path]
	if !ok || !known.modified.Equal(info.ModTime()) || known.size != info.Size() {
		known = executable{modified: info.ModTime(), size: info.Size()}
		if build, err := buildinfo.ReadFile(path); err == nil {
			known.main = build.Path
		}
		if r.seen == nil {
			r.seen = map[string]executable{}
		}
		r.seen[path] = known
	}
	kind, ok := strings.CutPrefix(known.main, referenceModule)
	return ok && strings.HasSuffix(kind, "/"+name) && strings.Count(kind, "/") == 1
}
