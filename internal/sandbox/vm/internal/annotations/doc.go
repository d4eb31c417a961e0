// Package annotations parses a pod's annotations about its machine: Virtlet's keys (VirtletVCPUCount …), and the same
// settings with our own prefix in kebab case (tripod.dev/vm.vcpu-count …). Begin with Parse.
//
//	pod.metadata.annotations ──Parse──▶ Options    settings for the backend and cloud-init
//	                              ├────▶ warnings   unknown keys, keys without effect
//	                              └────▶ error      InvalidArgument: key, value, allowed values
//
// The list of keys is data (Known), which Parse, the documentation's table and the tests are based on. Where Tripod
// differs from Virtlet, for example by refusing a value that Virtlet ignores, the table says so.
//
// The package must not read files or know mounts. It only checks the syntax of a reference to a ConfigMap or Secret.
package annotations
