package network

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// hashedPrefix marks keys that are hashes. IDs with this prefix are hashed too, so that no two IDs share a key.
const hashedPrefix = "id-sha256."

// maxPlainKey is the length limit of unhashed keys, in bytes. It keeps the file names of libcni's cache
// (network-key-interface) well below NAME_MAX.
const maxPlainKey = 100

// containerIDs matches the container IDs that CNI allows (SPEC.md 1.1.0, "Parameters"). "." and ".." do not match.
var containerIDs = lazyregexp.New(`^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$`)

// keyOf maps a pod ID to its key, which is the name of the netns file and the CNI container ID. The key is the pod ID
// itself if CNI allows that. IDs such as "example.com:foo.Bar@1.2.3#0" are hashed.
func keyOf(id string) string {
	if len(id) <= maxPlainKey && containerIDs().MatchString(id) && !strings.HasPrefix(id, hashedPrefix) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hashedPrefix + hex.EncodeToString(sum[:])
}

// validateID refuses strings that cannot be pod IDs. It exists only to catch callers' mistakes: keyOf is safe for any
// ID.
func validateID(id string) error {
	if id == "" || id == "." || id == ".." || strings.ContainsAny(id, "/\x00;=") {
		return invalidf("network: %q is not a pod ID: it must be a name without '/', ';', '=' and NUL", id)
	}
	return nil
}
