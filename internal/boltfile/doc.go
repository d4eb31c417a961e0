// Package boltfile creates, verifies and opens bbolt files, and reserves disk space for changes to them. What they contain is the
// callers'. Every bbolt file of the programs is opened here.
//
// A file is created under another name and renamed, so it is complete or absent: an empty or truncated one has lost its content.
// Before a file is opened for writing, all of it is read. This finds damaged pages that would end the process later. A damaged file
// is refused and never mistaken for a new one.
package boltfile
