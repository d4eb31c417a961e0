// Package download fetches single files by HTTP(S) into a content store. Interrupted transfers resume, also after a restart.
//
//	translation.Endpoint ──▶ Transfer (transfer.go): request, validators ──▶ part (part.go): an ingest ──▶ File: a blob
//
// Errors and messages have no passwords and no queries of URLs (url.go).
//
// The package must not know what the files are, or the names of images.
//
// # Subpackages
//
//	translation   maps names to URLs
package download
