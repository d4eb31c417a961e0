// Package config is the configuration of the tripod programs: one TOML file in which every key has a default.
//
// The defaults and their explanations are in default.toml, which is embedded. Default decodes it, and `tripod config
// default` prints it. A test checks that default.toml has every field of Config, each with a comment.
//
//	default.toml ──decode──▶ Config ◀──decode (over it)── /etc/tripod/config.toml
//	                           ▲
//	                           └── flags of the command line, then Complete: derived paths, validation
//
// The package must not touch the host: it creates no directories and opens no devices. `tripod check` tests what the
// host supports.
package config
