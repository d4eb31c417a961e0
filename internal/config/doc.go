// Package config owns the configuration of the tripod programs: one TOML file, every key with a default.
//
// The defaults and their explanation have one home, default.toml, which is embedded: Default decodes it, and
// `tripod config default` prints it. A test holds that it names every field of Config, each with a comment.
//
//	default.toml ──decode──▶ Config ◀──decode (over it)── /etc/tripod/config.toml
//	                           ▲
//	                           └── flags of the command line, then Complete: derived paths, validation
//
// The package must not touch the host (it makes no directory and looks at no device); it only knows what is
// written. What the host can do is the business of `tripod check`.
package config
