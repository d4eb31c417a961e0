package network

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// hashedPrefix marks the keys that are hashes; IDs that begin with it are hashed too, so that no two IDs share a key.
const hashedPrefix = "id-sha256."

// maxPlainKey keeps file names of libcni's cache (network-key-interface) well below NAME_MAX.
const maxPlainKey = 100

// containerIDs is what CNI allows as a container ID (SPEC.md 1.1.0, "Parameters"); dots alone cannot match.
var containerIDs = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$`)

// keyOf maps a pod ID to the name of its netns file and its CNI container ID: the ID itself if CNI allows it, and otherwise a hash,
// as for "example.com:foo.Bar@1.2.3#0".
func keyOf(id string) string {
	if len(id) <= maxPlainKey && containerIDs.MatchString(id) && !strings.HasPrefix(id, hashedPrefix) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hashedPrefix + hex.EncodeToString(sum[:])
}

// validateID refuses IDs that no pod has. Any key is safe; this finds mistakes of callers.
func validateID(id string) error {
	if id == "" || id == "." || id == ".." || strings.ContainsAny(id, "/\x00;=") {
		return invalidf("network: %q is not a pod ID: it must be a name without '/', ';', '=' and NUL", id)
	}
	return nil
}
