// Package readers has the readers that blobs pass through: digests, limits, cancellation and decompression.
//
// It must not know what is read.
package readers
