// Package validate says which fields of a pod and its container a machine cannot have. Begin with Container; the fields that are
// accepted without an effect are in Harmless. The package must not look at the node: whether a path exists, or a device is free,
// is found out when the machine is made.
package validate
