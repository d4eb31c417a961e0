// Package deps tests the rules of the repository. It tests which package may depend on which, directly or indirectly,
// that each package has a comment, and that kinds of pod do not repeat each other's code. It also tests that the links,
// paths and tests named in documents exist, that docs/faults.md has each row that the name of a test cites, and that ADR 39
// has the numbers of lines of what we wrote by hand. Package comments list the packages below them, and the comment of
// cmd/tripod its commands. Decisions (docs/adr) say on both sides which changed which, and docs/adr/README.md lists them.
package deps
