package cri

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/tripod-run/tripod/internal/keys"
)

const (
	// maxNameLength limits a name, a namespace or a UID, in bytes. The longest names in Kubernetes are DNS subdomains
	// (RFC 1123).
	maxNameLength = 253
	// maxKeyValueBytes limits the total size of all labels, or of all annotations. It is etcd's limit on the size of a
	// request.
	maxKeyValueBytes = 3 << 19
	// maxHostnameLength is the kernel's limit (__NEW_UTS_LEN).
	maxHostnameLength = 64
	// maxPathLength is the kernel's limit (PATH_MAX) without the final zero byte.
	maxPathLength = 4095
	maxPort       = 65535
)

type enum interface {
	~int32
	String() string
}

// validateEnum rejects a value that this version of the API does not define; the last parameter is the generated map of
// values.
func validateEnum[E enum](field string, value E, names map[int32]string) error {
	if _, known := names[int32(value)]; known {
		return nil
	}
	return invalid(field, "%d is not a value in this version of the API", int32(value))
}

// validateEach calls check with every element of a list and the element's field name.
func validateEach[T any](field string, items []T, check func(field string, item T) error) error {
	for i, item := range items {
		if err := check(fmt.Sprintf("%s[%d]", field, i), item); err != nil {
			return err
		}
	}
	return nil
}

// validateName checks a required name.
func validateName(field, name string) error {
	switch {
	case name == "":
		return required(field)
	case len(name) > maxNameLength:
		return invalid(field, "is %d bytes long; the limit is %d", len(name), maxNameLength)
	case strings.ContainsFunc(name, unicode.IsControl):
		return invalid(field, "%q has a control character", name)
	}
	return nil
}

func validateKeyValues(field string, pairs map[string]string) error {
	size := 0
	for k, v := range pairs {
		if k == "" {
			return invalid(field, "has an empty key")
		}
		size += len(k) + len(v)
	}
	if size > maxKeyValueBytes {
		return invalid(field, "hold %d bytes; the limit is %d", size, maxKeyValueBytes)
	}
	return nil
}

// validateAnnotations is like validateKeyValues and also rejects annotations that control planes must not set.
func validateAnnotations(field string, pairs map[string]string) error {
	for k := range pairs {
		if strings.HasPrefix(k, keys.Edge) {
			return invalid(field, "%q: annotations that begin with %q are reserved for edge modules", k, keys.Edge)
		}
	}
	return validateKeyValues(field, pairs)
}

// validateWords rejects zero bytes in an argument vector, because they would end a word early.
func validateWords(field string, words []string) error {
	return validateEach(field, words, func(field, word string) error {
		if strings.ContainsRune(word, 0) {
			return invalid(field, "has a zero byte")
		}
		return nil
	})
}

// validatePath checks a path that the kernel will receive. It also accepts "".
func validatePath(field, path string) error {
	switch {
	case strings.ContainsRune(path, 0):
		return invalid(field, "has a zero byte")
	case len(path) > maxPathLength:
		return invalid(field, "is %d bytes long; the limit is %d", len(path), maxPathLength)
	}
	return nil
}

// validateAbsolute accepts absolute paths and "".
func validateAbsolute(field, path string) error {
	if path != "" && !filepath.IsAbs(path) {
		return invalid(field, "%q must be an absolute path", path)
	}
	return validatePath(field, path)
}

// validateRelative accepts relative paths without "..", and "".
func validateRelative(field, path string) error {
	if filepath.IsAbs(path) {
		return invalid(field, "%q must be a relative path", path)
	}
	return cmp.Or(validateNoDotDot(field, path), validatePath(field, path))
}

func validateNoDotDot(field, path string) error {
	if slices.Contains(strings.Split(path, "/"), "..") {
		return invalid(field, `%q must not have ".." in it`, path)
	}
	return nil
}

func validatePort(field string, port, least int32) error {
	if port < least || port > maxPort {
		return invalid(field, "%d is not a port between %d and %d", port, least, maxPort)
	}
	return nil
}
