// Package deps tests the rules of the repository. Imports: which package may depend on which, directly or indirectly,
// and that each package has a comment. Code: kinds of pod do not repeat each other's code. Documents: the links, paths
// and tests that they name exist, and so does each docs/faults.md row that a test name cites.
package deps
