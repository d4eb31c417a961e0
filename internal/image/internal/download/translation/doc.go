// Package translation maps image names that belong to no registry to HTTP(S) URLs. Translation files define the mapping
// and how each URL is reached. Their format is that of Virtlet (see Virtlet's docs/image-name-translation.md).
//
//	virtlet.cloud/ubuntu/22.04:latest ── prefix off, tag off ──▶ "ubuntu/22.04"
//	                                                                  │
//	10-site.yaml  prefix: ""        names, then regexps, in order ◀───┤ files by name; the first matching rule applies
//	20-lab.yaml   prefix: lab       only names below "lab/"       ◀───┘
//	     │
//	     └──▶ Endpoint: URL and Transport (timeout, redirects, proxy, TLS) ──▶ Client
//
// A file that cannot be parsed is an error and is not ignored, because its rules might take precedence over others. The
// package downloads nothing and knows about neither the store nor the CRI.
package translation
