package play

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// accepted lists the fields of a Pod that have an effect, and what they become. Fields of init containers are those of
// containers. An entry includes the fields below it. docs/manifests.md has the same table; a test compares the two.
var accepted = []struct{ path, effect string }{
	{"kind", "`Pod`"},
	{"apiVersion", "`v1`"},
	{"metadata.name", "the pod's name"},
	{"metadata.namespace", "the pod's namespace; default: `default`"},
	{"metadata.labels", "the pod's labels"},
	{"metadata.annotations", "the pod's annotations"},
	{"spec.runtimeClassName", "the handler of this name; default: the node's"},
	{"spec.overhead", "the pod's overhead: CPU and memory"},
	{"spec.resources.limits", "limits of the whole pod: CPU and memory"},
	{"spec.resources.requests", "CPU shares of the whole pod; memory has no effect without a scheduler"},
	{"spec.restartPolicy", "`Never`: nothing restarts a container. `Always` has the same effect here; `OnFailure` is refused"},
	{"spec.terminationGracePeriodSeconds",
		"time that containers get to end when `--wait`, `--rm` or a failed step ends them; default: 30. `tripod rmp --force` kills them"},
	{"spec.hostname", "the host name; default: the pod's name"},
	{"spec.hostNetwork", "the node's network"},
	{"spec.hostPID", "the node's processes"},
	{"spec.hostIPC", "the node's IPC objects"},
	{"spec.hostUsers", "`false`: a user namespace with a range of the node"},
	{"spec.shareProcessNamespace", "one PID namespace for all containers"},
	{"spec.hostAliases", "a file /etc/hosts with the aliases"},
	{"spec.dnsPolicy", "`Default`: the node's resolvers that the pod can reach, also without a policy; `None`: those of dnsConfig. `ClusterFirst` is `Default` here; `ClusterFirstWithHostNet` is refused"},
	{"spec.dnsConfig", "resolvers, search domains and options, with the policy `None`"},
	{"spec.automountServiceAccountToken", "`false`: there are no tokens"},
	{"spec.os.name", "`linux`"},

	{"spec.securityContext.runAsUser", "the user of containers that have none"},
	{"spec.securityContext.runAsGroup", "the group of containers that have none; without runAsUser, with the image's user"},
	{"spec.securityContext.runAsNonRoot", "checked against the container's or the image's user"},
	{"spec.securityContext.supplementalGroups", "groups of every container"},
	{"spec.securityContext.supplementalGroupsPolicy", "`Merge` or `Strict`"},
	{"spec.securityContext.fsGroup", "a group of every container, which owns the pod's volumes of files"},
	{"spec.securityContext.fsGroupChangePolicy", "accepted: the volumes are new"},
	{"spec.securityContext.sysctls", "the pod's sysctls"},
	{"spec.securityContext.seccompProfile.type", "`RuntimeDefault` or `Unconfined`; default: the node's"},
	{"spec.securityContext.appArmorProfile", "the profile of containers that have none"},
	{"spec.securityContext.seLinuxOptions", "the pod's SELinux label"},

	{"spec.volumes[].name", "the name for volumeMounts"},
	{"spec.volumes[].emptyDir",
		"a directory on the node's disk that is removed with the pod; also for a volume without a source. A medium or a sizeLimit is refused"},
	{"spec.volumes[].hostPath.path", "a path of the node"},
	{"spec.volumes[].hostPath.type", "checked, or made, before the pod is"},
	{"spec.volumes[].configMap", "files, read-only, from a ConfigMap in the same file"},
	{"spec.volumes[].secret", "files, read-only, from a Secret in the same file"},
	{"spec.volumes[].projected",
		"nothing, for the service account's token as a cluster adds it: its mounts are left out, with a warning. Others are refused"},

	{"spec.containers[].name", "the container's name"},
	{"spec.containers[].image", "the image"},
	{"spec.containers[].imagePullPolicy",
		"`Always`, `IfNotPresent` or `Never`; default: `Always` for the tag latest or none, otherwise `IfNotPresent`"},
	{"spec.containers[].command", "the command, with $(NAME) replaced by the container's variables"},
	{"spec.containers[].args", "the arguments, likewise"},
	{"spec.containers[].workingDir", "the working directory"},
	{"spec.containers[].ports[].name", "accepted: it is for Services"},
	{"spec.containers[].ports[].containerPort", "a port of the pod"},
	{"spec.containers[].ports[].hostPort", "a port of the node that leads to it, and that no other pod or process has"},
	{"spec.containers[].ports[].hostIP", "the node's address of that port"},
	{"spec.containers[].ports[].protocol", "`TCP`, `UDP` or `SCTP`"},
	{"spec.containers[].env[].name", "a variable"},
	{"spec.containers[].env[].value", "its value, with $(NAME) replaced by variables before it"},
	{"spec.containers[].env[].valueFrom.fieldRef",
		"a field of the pod: metadata.name, namespace, uid, labels['KEY'], annotations['KEY']; spec.nodeName; status.podIP, podIPs"},
	{"spec.containers[].env[].valueFrom.configMapKeyRef", "a value of a ConfigMap in the same file"},
	{"spec.containers[].env[].valueFrom.secretKeyRef", "a value of a Secret in the same file"},
	{"spec.containers[].envFrom[].prefix", "a prefix of the names"},
	{"spec.containers[].envFrom[].configMapRef", "all values of a ConfigMap in the same file"},
	{"spec.containers[].envFrom[].secretRef", "all values of a Secret in the same file"},
	{"spec.containers[].resources.limits", "limits of CPU and memory"},
	{"spec.containers[].resources.requests", "CPU shares; memory has no effect without a scheduler"},
	{"spec.containers[].volumeMounts[].name", "the volume"},
	{"spec.containers[].volumeMounts[].mountPath", "where it is mounted"},
	{"spec.containers[].volumeMounts[].readOnly", "a read-only mount"},
	{"spec.containers[].volumeMounts[].recursiveReadOnly", "`Enabled` or `Disabled`"},
	{"spec.containers[].volumeMounts[].subPath", "one file or directory of a ConfigMap or Secret; refused for other volumes"},
	{"spec.containers[].volumeMounts[].mountPropagation", "`None`, `HostToContainer` or `Bidirectional`"},
	{"spec.containers[].securityContext.privileged", "a privileged container"},
	{"spec.containers[].securityContext.allowPrivilegeEscalation", "`false`: no new privileges"},
	{"spec.containers[].securityContext.capabilities", "added and dropped capabilities"},
	{"spec.containers[].securityContext.runAsUser", "the user"},
	{"spec.containers[].securityContext.runAsGroup", "the group; without runAsUser, with the image's user"},
	{"spec.containers[].securityContext.runAsNonRoot", "checked against the container's or the image's user"},
	{"spec.containers[].securityContext.readOnlyRootFilesystem", "a read-only root file system"},
	{"spec.containers[].securityContext.procMount", "`Default`"},
	{"spec.containers[].securityContext.seccompProfile.type", "`RuntimeDefault` or `Unconfined`"},
	{"spec.containers[].securityContext.appArmorProfile", "the AppArmor profile"},
	{"spec.containers[].securityContext.seLinuxOptions", "the SELinux label"},
	{"spec.containers[].stdin", "an open standard input, for attach"},
	{"spec.containers[].stdinOnce", "closed after the first attach"},
	{"spec.containers[].tty", "a terminal"},
	{"spec.containers[].lifecycle.stopSignal", "the signal that asks it to end"},
	{"spec.initContainers[].restartPolicy", "`Always`: a sidecar, which runs beside the containers"},
}

// ignored lists the fields of a Pod that have no effect on a node alone, and why. If an entry has values, only these have
// none, such as the default of the API; another value is refused, or has the effect that accepted lists. A pod runs as if
// these fields were left out, and a warning names them. docs/manifests.md has the same table; a test compares the two.
var ignored = []ignoredField{
	{"metadata.generateName", nil, "the pod has its name"},
	{"metadata.uid", nil, "each run gives the pod a new one"},
	{"metadata.creationTimestamp", nil, "of the API server"},
	{"metadata.deletionTimestamp", nil, "of the API server"},
	{"metadata.deletionGracePeriodSeconds", nil, "of the API server"},
	{"metadata.resourceVersion", nil, "of the API server"},
	{"metadata.generation", nil, "of the API server"},
	{"metadata.managedFields", nil, "of the API server"},
	{"metadata.selfLink", nil, "of the API server"},
	{"metadata.ownerReferences", nil, "there are no controllers"},
	{"metadata.finalizers", nil, "there are no controllers"},
	{"spec.restartPolicy", []string{"Always"}, "nothing restarts a container"},
	{"spec.dnsPolicy", []string{"ClusterFirst"}, "there is no DNS of a cluster; the node's resolvers are used"},
	{"spec.nodeName", nil, "this node runs the pod"},
	{"spec.schedulerName", nil, "there is no scheduler"},
	{"spec.tolerations", nil, "there are no taints"},
	{"spec.topologySpreadConstraints", nil, "there are no other nodes"},
	{"spec.priority", nil, "nothing is evicted"},
	{"spec.priorityClassName", nil, "nothing is evicted"},
	{"spec.preemptionPolicy", []string{"Never", "PreemptLowerPriority"}, "nothing is evicted"},
	{"spec.serviceAccountName", []string{"default"}, "there are no service accounts"},
	{"spec.serviceAccount", []string{"default"}, "there are no service accounts"},
	{"spec.automountServiceAccountToken", []string{"true"}, "there are no tokens"},
	{"spec.enableServiceLinks", nil, "there are no Services"},
	{"spec.readinessGates", nil, "there are no Services"},
	{"spec.setHostnameAsFQDN", []string{"false"}, "the host name is short"},
	{"spec.containers[].terminationMessagePath", []string{corev1.TerminationMessagePathDefault}, "nothing reads the message"},
	{"spec.containers[].terminationMessagePolicy", []string{"FallbackToLogsOnError", "File"}, "nothing reads the message"},
	{"spec.containers[].resizePolicy", nil, "nothing resizes a pod"},
	{"status", nil, "of the API server"},
}

type ignoredField struct {
	path   string
	values []string // nil: all
	why    string
}

// compare returns an error for each field of the pod that is set and has no place in the tables, and the names of the
// fields that are set and ignored.
func compare(pod *corev1.Pod) (field.ErrorList, map[string]bool) {
	w := &walker{accepted: map[string]bool{}, above: map[string]bool{}, ignored: map[string]ignoredField{}, found: map[string]bool{}}
	for _, f := range ignored {
		w.ignored[f.path] = f
	}
	for _, f := range accepted {
		w.accepted[f.path] = true
		for i, c := range f.path {
			if c == '.' || c == '[' {
				w.above[f.path[:i]] = true
			}
		}
	}
	w.fields(nil, "", reflect.ValueOf(*pod))
	return w.errs, w.found
}

// walker visits the fields that are set.
type walker struct {
	accepted map[string]bool // paths of the table
	above    map[string]bool // paths above those
	ignored  map[string]ignoredField
	errs     field.ErrorList
	found    map[string]bool // names of ignored fields
}

// fields visits the fields of a struct. The key is its path without indexes.
func (w *walker) fields(path *field.Path, key string, v reflect.Value) {
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		switch {
		case v.Type().Field(i).Anonymous && name == "":
			w.fields(path, key, v.Field(i))
		case path == nil:
			w.visit(field.NewPath(name), name, v.Field(i))
		default:
			w.visit(path.Child(name), key+"."+name, v.Field(i))
		}
	}
}

func (w *walker) visit(path *field.Path, key string, v reflect.Value) {
	empty := (v.Kind() == reflect.Slice || v.Kind() == reflect.Map) && v.Len() == 0
	if v.IsZero() || empty {
		return
	}
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	switch {
	case w.ignores(key, v) || w.isAccepted(key):
	case w.ignored[ofContainer(key)].values != nil:
		w.errs = append(w.errs, field.NotSupported(path, fmt.Sprint(v), w.ignored[ofContainer(key)].values))
	case v.Kind() == reflect.Slice && w.isAbove(key):
		for i := range v.Len() {
			w.fields(path.Index(i), key+"[]", v.Index(i))
		}
	case v.Kind() == reflect.Struct && w.isAbove(key):
		w.fields(path, key, v)
	default:
		w.errs = append(w.errs, field.Forbidden(path, "not supported without a cluster"))
	}
}

// ignores reports whether the value has no effect, and notes the name of its field.
func (w *walker) ignores(key string, v reflect.Value) bool {
	f, known := w.ignored[ofContainer(key)]
	switch value := fmt.Sprint(v); {
	case !known || f.values != nil && !slices.Contains(f.values, value):
		return false
	case f.values == nil:
		w.found[key] = true
	default:
		w.found[key+": "+value] = true
	}
	return true
}

func (w *walker) isAccepted(key string) bool { return w.accepted[key] || w.accepted[ofContainer(key)] }
func (w *walker) isAbove(key string) bool    { return w.above[key] || w.above[ofContainer(key)] }

// ofContainer returns the path of the same field of a container that is no init container.
func ofContainer(key string) string {
	if rest, ok := strings.CutPrefix(key, "spec.initContainers"); ok {
		return fmt.Sprint("spec.containers", rest)
	}
	return key
}
