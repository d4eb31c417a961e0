// Package annotations parses a pod's annotations about its machine. Each setting has a key of our own, in kebab case
// with a prefix (tripod.dev/vm.vcpu-count …). Most settings also have the key that Virtlet uses (VirtletVCPUCount …).
// Begin with Parse.
//
//	pod.metadata.annotations ──Parse──▶ Options    settings for the backend and cloud-init
//	                              ├────▶ warnings   unknown keys, keys without effect
//	                              └────▶ error      InvalidArgument: key, value, allowed values
//
// Known lists the keys. Parse, the table in the documentation and the tests all use that list. Where Tripod differs
// from Virtlet, for example by refusing a value that Virtlet ignores, the list says so.
//
// The package must not read files or know about mounts. It checks only the syntax of a reference to a ConfigMap or
// Secret.
package annotations
