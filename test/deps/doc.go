// Package deps holds the house's rules about imports, as tests: which package may depend on which, directly or
// through others, and that each explains itself. It has no other content.
package deps
