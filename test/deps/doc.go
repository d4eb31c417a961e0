// Package deps holds the rules of the repository as tests. Imports: which package may depend on which, directly or through
// others, and that each package explains itself. Code: two kinds of pod share it and do not repeat it. Documents: links, paths
// and the tests that they name exist, and each row of docs/faults.md that the name of a test cites is there.
package deps
