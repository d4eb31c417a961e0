package wasm

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"regexp"
	"strings"
)

// hexID is the form of the IDs of pods without a component name, and of the keys of all pods.
var hexID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// componentID is the form of the IDs of pods with one: component#n.
var componentID = regexp.MustCompile(`^[^/\x00#]{1,400}#[0-9a-f]+$`)

// keyOf is the name of a pod in file systems and cgroups.
func keyOf(id string) string {
	if hexID.MatchString(id) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

// shortName is what a file is called after a SHA-256 digest: half of it is more than enough to tell it from others.
func shortName(digest string) string {
	digest = strings.TrimPrefix(digest, "sha256:")
	return digest[:min(len(digest), 32)]
}

// Where things are. All of it follows from the configuration and the IDs.

func (c Config) cacheDir() string        { return filepath.Join(c.Root, "cache") }
func (c Config) podsDir() string         { return filepath.Join(c.RunDir, "pods") }
func (c Config) workersDir() string      { return filepath.Join(c.RunDir, "workers") }
func (c Config) podDir(id string) string { return filepath.Join(c.podsDir(), keyOf(id)) }
