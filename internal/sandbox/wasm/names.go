package wasm

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// hexID matches the IDs of pods without a component name, and the keys of all pods.
var hexID = lazyregexp.New(`^[0-9a-f]{64}$`)

// componentID matches the IDs of pods with a component name: component#n.
var componentID = lazyregexp.New(`^[^/\x00#]{1,400}#[0-9a-f]+$`)

// keyOf returns the key of a pod: its name in file systems and cgroups.
func keyOf(id string) string {
	if hexID().MatchString(id) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

// Directories of the backend.

func (c Config) cacheDir() string        { return CodeDir(c.Root) }
func (c Config) podsDir() string         { return filepath.Join(c.RunDir, "pods") }
func (c Config) workersDir() string      { return filepath.Join(c.RunDir, "workers") }
func (c Config) dialersDir() string      { return filepath.Join(c.RunDir, "dialers") }
func (c Config) podDir(id string) string { return filepath.Join(c.podsDir(), keyOf(id)) }

// CodeDir returns the directory of the compiled code below Config.Root.
func CodeDir(root string) string { return filepath.Join(root, "cache") }
