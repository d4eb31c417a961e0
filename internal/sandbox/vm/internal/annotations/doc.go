// Package annotations reads what the annotations of a pod say about its VM: those of Virtlet (VirtletVCPUCount …) and the
// same under our own prefix in kebab case (tripod.dev/vm.vcpu-count …).
//
//	pod.metadata.annotations ──Parse──▶ Options   what the backend and cloud-init obey
//	                              ├────▶ warnings  a key that nobody knows, a key without effect
//	                              └────▶ error     InvalidArgument: key, value, what is allowed
//
// The list of keys is data (Known), from which Parse, the documentation's table and the tests are made. Where Virtlet and
// Tripod differ (a value that Virtlet ignores is refused here), the table's text says it.
//
// The package must not read files or know of mounts: a reference to a ConfigMap or a Secret is only checked for its form.
package annotations
