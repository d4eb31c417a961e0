// Package crilog reads and writes the CRI's log format: Parse reads an entry, and a Writer writes a log file. The
// package must not know where log files are, because internal/stream opens them safely.
//
//	guest's stdout ──► Writer.Stream ──► lines, or pieces of long ones ──► file ◄── Replace, at a rotation
package crilog
