// Package lazyregexp has regular expressions that are compiled when they are first used. All expressions of the program
// together take 1 MiB compiled, and a node uses only those of its kinds of pods.
package lazyregexp

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// inTest is true in test programs.
var inTest = strings.HasSuffix(os.Args[0], ".test")

// New returns a function that compiles the expression when first called, and returns it. In test programs, New compiles
// it at once, so that an invalid expression fails every test of its package.
func New(expression string) func() *regexp.Regexp {
	compiled := sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })
	if inTest {
		compiled()
	}
	return compiled
}
