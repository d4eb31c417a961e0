// Package translation finds where an image name leads that is no registry's: a table of files says which HTTP(S) URL a
// name stands for, and how that is reached. The files are those of Virtlet (docs/image-name-translation.md there).
//
//	virtlet.cloud/ubuntu/22.04:latest ── prefix off, tag off ──▶ "ubuntu/22.04"
//	                                                                  │
//	10-site.yaml  prefix: ""        names, then regexps, in order ◀───┤ files by name; the first rule that matches counts
//	20-lab.yaml   prefix: lab       only names below "lab/"       ◀───┘
//	     │
//	     └──▶ Endpoint: URL and Transport (timeout, redirects, proxy, TLS) ──▶ Client
//
// A file that cannot be understood is an error, not a file less: what it says might come before what others say.
// The package downloads nothing and knows neither the store nor the CRI.
package translation
