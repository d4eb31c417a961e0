// Package crilog is the CRI's log format: Parse reads its lines, Writer writes log files in it. It knows files that are
// open, not where they are: who opens a container's log, and how safely, is the caller's matter (internal/stream).
//
//	guest's stdout ──► Writer.Stream ──► lines, or pieces of long ones ──► file ◄── Replace, at a rotation
package crilog
