package iso9660

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	sectorSize = 2048
	// MaxSize is the maximum total size of the files in bytes. The files are held in memory, and each file is a single
	// extent.
	MaxSize = 256 << 20
	// maxLabel is the maximum length of a Joliet volume identifier in characters.
	maxLabel = 16
	// maxName is the maximum length of a Joliet file identifier in characters. Names in the primary tree are cut to 27.
	maxName = 64
	// maxDepth is the maximum number of directory levels in ECMA-119, including the root.
	maxDepth = 8
)

// File is a file in an image. Build adds the necessary directories, with mode 0755.
type File struct {
	// Path is relative to the root, slash-separated and clean. Its elements consist of letters, digits, '.', '-' and '_'.
	Path string
	Data []byte
	// Mode holds the permission bits; 0 means 0644. The owner is root.
	Mode os.FileMode
}

// Build makes an image. Its volume label, which blkid shows, consists of 1 to 16 letters, digits, '-' and '_'. Build
// returns errdefs.ErrInvalidArgument if the label, a path or the total size is invalid.
func Build(label string, files []File) ([]byte, error) {
	if label == "" || len(label) > maxLabel || strings.Trim(label, nameChars) != "" {
		return nil, fmt.Errorf("volume label %q does not consist of 1 to %d letters, digits, '-' and '_': %w", label, maxLabel,
			errdefs.ErrInvalidArgument)
	}
	root := &node{dir: true, mode: 0o755}
	root.parent = root
	total := 0
	for _, f := range files {
		if total += len(f.Data); total > MaxSize {
			return nil, fmt.Errorf("file %q: the image would be larger than %d bytes: %w", f.Path, MaxSize, errdefs.ErrInvalidArgument)
		}
		if err := root.add(f); err != nil {
			return nil, err
		}
	}
	root.identify()
	return newLayout(root).image(label), nil
}

const (
	upper     = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	digits    = "0123456789"
	nameChars = upper + "abcdefghijklmnopqrstuvwxyz" + digits + "-_"
)

// node is a file or a directory.
type node struct {
	name     string
	dir      bool
	mode     os.FileMode
	data     []byte
	parent   *node
	children []*node

	// primaryID is the name in the primary tree.
	primaryID string
	// extent is the content's first sector, and size the content's length in bytes. A directory has an extent of its
	// own in each tree; a file has the same extent in both trees.
	extent, size [trees]uint32
	// number is a directory's number in the path tables. Numbers start at 1.
	number [trees]uint16
}

// The two trees of an image.
const (
	primary = iota
	joliet
	trees
)

func (n *node) add(f File) error {
	refuse := func(why string) error {
		return fmt.Errorf("file %q: %s: %w", f.Path, why, errdefs.ErrInvalidArgument)
	}
	parts := strings.Split(f.Path, "/")
	switch {
	case path.Clean(f.Path) != f.Path || f.Path == "." || strings.HasPrefix(f.Path, "/") || parts[0] == "..":
		return refuse("the path is not relative and clean")
	case len(parts) >= maxDepth:
		return refuse("the path has too many directories")
	}
	at := n
	for i, part := range parts {
		if len(part) > maxName || strings.Trim(part, nameChars+".") != "" {
			return refuse("an element does not consist of 1 to 64 letters, digits, '.', '-' and '_'")
		}
		last := i == len(parts)-1
		found := slices.IndexFunc(at.children, func(c *node) bool { return c.name == part })
		switch {
		case found >= 0 && (last || !at.children[found].dir):
			return refuse("the path is used twice")
		case found >= 0:
			at = at.children[found]
		default:
			child := &node{name: part, dir: true, mode: 0o755, parent: at}
			at.children = append(at.children, child)
			at = child
		}
	}
	at.dir, at.data, at.mode = false, f.Data, f.Mode.Perm()
	if at.mode == 0 {
		at.mode = 0o644
	}
	return nil
}

// identify sets the primaryID of all nodes below n. An ID is unique in its directory. It consists of capital letters,
// digits and underscores; a file's ID also has an extension and a version number.
func (n *node) identify() {
	taken := map[string]bool{}
	slices.SortFunc(n.children, func(a, b *node) int { return strings.Compare(a.name, b.name) })
	for _, c := range n.children {
		stem, extension := c.name, ""
		if dot := strings.LastIndexByte(c.name, '.'); dot > 0 && !c.dir {
			stem, extension = c.name[:dot], shorten(dChars(c.name[dot+1:]), 3)
		}
		stem = dChars(stem)
		for i := 0; ; i++ {
			suffix := ""
			if i > 0 {
				suffix = fmt.Sprintf("_%d", i)
			}
			c.primaryID = shorten(stem, 23-len(suffix)) + suffix
			if !c.dir {
				c.primaryID += "." + extension + ";1"
			}
			if !taken[c.primaryID] {
				break
			}
		}
		taken[c.primaryID] = true
		if c.dir {
			c.identify()
		}
	}
}

// dChars converts s to the d-characters of ECMA-119: capital letters, digits and underscores.
func dChars(s string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(upper+digits, r) {
			return r
		}
		return '_'
	}, strings.ToUpper(s))
}

func shorten(s string, n int) string { return s[:min(len(s), n)] }

// id returns a node's identifier in a tree.
func (n *node) id(tree int) []byte {
	if tree == primary {
		return []byte(n.primaryID)
	}
	return ucs2(n.name)
}

// sorted returns the children in the order of their identifiers in a tree.
func (n *node) sorted(tree int) []*node {
	return slices.SortedFunc(slices.Values(n.children), func(a, b *node) int {
		return slices.Compare(a.id(tree), b.id(tree))
	})
}

// ucs2 encodes ASCII text as big-endian 16-bit characters.
func ucs2(s string) []byte {
	b := make([]byte, 0, 2*len(s))
	for i := range len(s) {
		b = append(b, 0, s[i])
	}
	return b
}
