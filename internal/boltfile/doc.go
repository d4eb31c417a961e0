// Package boltfile creates, verifies and opens bbolt files, and reserves disk space for changes to them. This package
// opens all bbolt files of our programs; the callers define the content of the files.
//
// A file is created under another name and then renamed, so it is either complete or absent. An empty or truncated file
// has therefore lost its content. Open reads the whole file before it returns, to find damaged pages that would crash
// the process later. A damaged file is refused and never mistaken for a new one.
package boltfile
