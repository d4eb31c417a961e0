// Package keys has the keys of Tripod's own annotations and labels: on pods and containers, in images, and in the node's stores.
// The keys of components are below another prefix, which the configuration sets (node.component_label_prefix).
//
//	tripod.dev/vm.<name>     annotations of machines; the names are in internal/sandbox/vm/internal/annotations
//	tripod.dev/edge.<name>   annotations that only the edge front door sets
//	tripod.dev/<name>        annotations in manifests, labels of records
//	vimana.host/<name>       annotations of components; the names are in internal/sandbox/wasm/internal/annotations
package keys

// Domain is the prefix of all keys.
const Domain = "tripod.dev/"

// Annotations of pods and containers.
const (
	// VM is the prefix of annotations of machines. The rest of VMDisk is a device; the value is what is plugged into it.
	VM     = Domain + "vm."
	VMDisk = VM + "disk."
	// Edge is the prefix of annotations that only the edge front door sets. CRI requests that have such annotations are refused.
	Edge = Domain + "edge."
	// EdgeRuntime is a pod annotation with the UUID of the runtime whose module the pod runs, EdgeModule one with the module's,
	// and EdgeDeadline one with the time at which the module is to end.
	EdgeRuntime  = Edge + "runtime"
	EdgeModule   = Edge + "module"
	EdgeDeadline = Edge + "deadline"
	// EdgeChannels is a container annotation with the container's channels, as a JSON array of channel.Channel.
	EdgeChannels = Edge + "channels"
)

// Components is the usual prefix of the keys of components, which is Vimana's.
const Components = "vimana.host/"

// Services is an annotation of manifests. It lists the full names of a component's services, separated by commas.
const Services = Domain + "services"

// Labels of the image store.
const (
	// Pull is a label on leases. Its value is the reference that the lease's pull fetches.
	Pull = Domain + "pull"
	// Owner is a label on snapshots that says what they are for.
	Owner = Domain + "owner"
	// Public is a label on the record of a name. It says that the name's last pull needed no login.
	Public = Domain + "public"
	// Source, ETag and LastModified are labels on the record of a file that was downloaded: its URL, and the validators that the
	// server sent with it.
	Source       = Domain + "source"
	ETag         = Domain + "etag"
	LastModified = Domain + "last-modified"
	// Image is a label on leases and snapshots of an image, with the image's ID. RootDisk is one on leases of root disks.
	Image    = Domain + "image"
	RootDisk = Domain + "root-disk"
)

// Bench is a label on the pods of a benchmark.
const Bench = Domain + "bench"

// former is the domain that earlier versions used in images and in the image store.
const former = "tripod.run/"

// Former returns the form of a key in images and records of earlier versions.
func Former(key string) string { return former + key[len(Domain):] }

// Value returns the value of a key in annotations or labels, which an earlier version may have written, or "".
func Value(all map[string]string, key string) string {
	if value, ok := all[key]; ok {
		return value
	}
	return all[Former(key)]
}
