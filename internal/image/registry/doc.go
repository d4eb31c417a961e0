// Package registry is the access to registries: hosts.toml files, logins, TLS, and a transport that evens out what
// registries answer. Config.Resolver makes a resolver of containerd for one transfer.
//
//	hosts.toml ──▶ hosts and mirrors ──▶ transport (transport.go): types of manifests, mirrors that are passed over
//	logins     ──▶ for trusted hosts     tls.go: no login leaves TLS
//
// # Hosts
//
// Hosts, mirrors, certificates and plain http come from hosts.toml files (Config.HostsDir, in containerd's certs.d
// layout, including "_default"). Other hosts use https. As in containerd, requests to a registry on a loopback address
// fall back to http, unless the registry's port is 443. The login of a pull goes to the registry that the reference
// names, or to the "server" that hosts.toml puts in the place of that registry. A mirror gets the login only if the
// login's ServerAddress names that mirror. A host that a registry redirects to never gets the login, and neither does an
// address without TLS that a registry with TLS names (tls.go).
//
// The package must not know the image store: it stores nothing, and does not check content.
package registry
