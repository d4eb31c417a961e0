// Package layer applies the layers of images, and opens what was applied.
//
//	blob ── Applier: digest, limits, paths ──▶ directory   whiteouts (whiteouts.go) in the overlay's form
//	blob ── Compare ──────────────────────────▶ the first file that differs
//	mounts of a view ── WithRoot ─────────────▶ Root: files by openat2, inside the image
//
// An image may be malicious: its layers cannot write outside their directory, exceed the limits, make devices, or set
// the overlay's own attributes.
//
// The package must not know images or records: its callers say which layers lie above each other.
package layer
