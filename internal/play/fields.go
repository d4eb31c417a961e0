package play

import (
	"fmt"
	"reflect"
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
	{"spec.restartPolicy", "`Never`: nothing restarts a container. Other policies are refused"},
	{"spec.terminationGracePeriodSeconds", "time that containers get to end when `--wait`, `--rm` or a failed step ends them; default: 30. `tripod rmp --force` kills them"},
	{"spec.hostname", "the host name; default: the pod's name"},
	{"spec.hostNetwork", "the node's network"},
	{"spec.hostPID", "the node's processes"},
	{"spec.hostIPC", "the node's IPC objects"},
	{"spec.hostUsers", "`false`: a user namespace with a range of the node"},
	{"spec.shareProcessNamespace", "one PID namespace for all containers"},
	{"spec.hostAliases", "a file /etc/hosts with the aliases"},
	{"spec.dnsPolicy", "`Default`: the node's resolvers, also without a policy; `None`: those of dnsConfig. There is no DNS of a cluster"},
	{"spec.dnsConfig", "resolvers, search domains and options, with the policy `None`"},
	{"spec.enableServiceLinks", "accepted: there are no Services"},
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
	{"spec.volumes[].emptyDir", "a directory on the node's disk that is removed with the pod. A medium or a sizeLimit is refused"},
	{"spec.volumes[].hostPath.path", "a path of the node"},
	{"spec.volumes[].hostPath.type", "checked, or made, before the pod is"},
	{"spec.volumes[].configMap", "files, read-only, from a ConfigMap in the same file"},
	{"spec.volumes[].secret", "files, read-only, from a Secret in the same file"},

	{"spec.containers[].name", "the container's name"},
	{"spec.containers[].image", "the image"},
	{"spec.containers[].imagePullPolicy", "`Always`, `IfNotPresent` or `Never`; default: `Always` for the tag latest or none, otherwise `IfNotPresent`"},
	{"spec.containers[].command", "the command, with $(NAME) replaced by the container's variables"},
	{"spec.containers[].args", "the arguments, likewise"},
	{"spec.containers[].workingDir", "the working directory"},
	{"spec.containers[].ports[].name", "accepted: it is for Services"},
	{"spec.containers[].ports[].containerPort", "a port of the pod"},
	{"spec.containers[].ports[].hostPort", "a port of the node that leads to it"},
	{"spec.containers[].ports[].hostIP", "the node's address of that port"},
	{"spec.containers[].ports[].protocol", "`TCP`, `UDP` or `SCTP`"},
	{"spec.containers[].env[].name", "a variable"},
	{"spec.containers[].env[].value", "its value, with $(NAME) replaced by variables before it"},
	{"spec.containers[].env[].valueFrom.fieldRef", "a field of the pod: metadata.name, namespace, uid, labels['KEY'], annotations['KEY']; spec.nodeName; status.podIP, podIPs"},
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

// unsupported returns an error for each field of the pod that is set and not accepted.
func unsupported(pod *corev1.Pod) field.ErrorList {
	w := &walker{accepted: map[string]bool{}, above: map[string]bool{}}
	for _, f := range accepted {
		w.accepted[f.path] = true
		for i, c := range f.path {
			if c == '.' || c == '[' {
				w.above[f.path[:i]] = true
			}
		}
	}
	w.fields(nil, "", reflect.ValueOf(*pod))
	return w.errs
}

// walker visits the fields that are set.
type walker struct {
	accepted map[string]bool // paths of the table
	above    map[string]bool // paths above those
	errs     field.ErrorList
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
	if v.IsZero() || empty || w.isAccepted(key) {
		return
	}
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	switch {
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

func (w *walker) isAccepted(key string) bool { return w.accepted[key] || w.accepted[ofContainer(key)] }
func (w *walker) isAbove(key string) bool    { return w.above[key] || w.above[ofContainer(key)] }

// ofContainer returns the path of the same field of a container that is no init container.
func ofContainer(key string) string {
	if rest, ok := strings.CutPrefix(key, "spec.initContainers"); ok {
		return fmt.Sprint("spec.containers", rest)
	}
	return key
}
