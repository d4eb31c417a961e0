// Package crilog reads and writes the CRI's log format: Parse reads an entry, a Writer writes a log file. It must not
// know where log files are: internal/stream opens them safely.
//
//	guest's stdout ──► Writer.Stream ──► lines, or pieces of long ones ──► file ◄── Replace, at a rotation
package crilog
