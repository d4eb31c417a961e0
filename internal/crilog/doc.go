// Package crilog is the CRI's log format: Parse reads an entry, a Writer writes log files. It takes open files and must not
// know where they are: opening a container's log safely is the caller's task (internal/stream).
//
//	guest's stdout ──► Writer.Stream ──► lines, or pieces of long ones ──► file ◄── Replace, at a rotation
package crilog
