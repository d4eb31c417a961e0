package play

import (
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// source is a volume as containers mount it.
type source struct {
	path     string
	readonly bool // no container can change it
	own      bool // it is removed with the pod
	absent   bool // its mounts are left out
	files    []file
}

// has reports whether the volume has the file, or a directory with files.
func (s source) has(name string) bool {
	return filepath.IsLocal(name) && slices.ContainsFunc(s.files, func(f file) bool {
		return f.name == path.Clean(name) || strings.HasPrefix(f.name, path.Clean(name)+"/")
	})
}

// volume is a directory to make for the pod.
type volume struct {
	path  string
	mode  fs.FileMode
	group *int64 // owner; nil: root
	files []file
}

// file is a file of a volume. Its name can have directories.
type file struct {
	name string
	mode fs.FileMode
	data []byte
}

// hostPath is a path of the node that a volume names.
type hostPath struct {
	at   *field.Path
	path string
	kind corev1.HostPathType
}

func (t *translator) planVolumes(p *Pod) {
	t.volumesByName = map[string]source{}
	for i := range t.pod.Spec.Volumes {
		v, at := &t.pod.Spec.Volumes[i], field.NewPath("spec", "volumes").Index(i)
		t.check(at.Child("name"), v.Name, validation.IsDNS1123Label(v.Name))
		if _, exists := t.volumesByName[v.Name]; exists {
			t.errs = append(t.errs, field.Duplicate(at.Child("name"), v.Name))
		}
		t.volumesByName[v.Name] = t.planVolume(at, p, v)
	}
}

// planVolume returns the volume for the mounts. It reports no error for a source that compare refuses.
func (t *translator) planVolume(at *field.Path, p *Pod, v *corev1.Volume) source {
	dir := path.Join(p.dir, "volumes", v.Name)
	group := t.podSecurity().FSGroup
	switch {
	case v.HostPath != nil:
		return t.planHostPath(at.Child("hostPath"), p, v.HostPath)
	case v.Projected != nil:
		return t.planProjected(at.Child("projected"), v.Projected)
	case v.EmptyDir != nil, v.VolumeSource == corev1.VolumeSource{}: // the default of the API
		t.checkEmptyDir(at.Child("emptyDir"), v.EmptyDir)
		p.volumes = append(p.volumes, &volume{path: dir, mode: 0o777, group: group})
		return source{path: dir, own: true}
	case v.ConfigMap != nil:
		s := v.ConfigMap
		data, err := t.data(at.Child("configMap"), t.configMaps, s.Name, s.Optional)
		return t.planFiles(at.Child("configMap"), p, dir, data.files, err, s.Items, s.DefaultMode, s.Optional)
	case v.Secret != nil:
		s := v.Secret
		data, err := t.data(at.Child("secret"), t.secrets, s.SecretName, s.Optional)
		if err != nil {
			err.Field = at.Child("secret", "secretName").String()
		}
		return t.planFiles(at.Child("secret"), p, dir, data.files, err, s.Items, s.DefaultMode, s.Optional)
	}
	return source{}
}

func (t *translator) planHostPath(at *field.Path, p *Pod, h *corev1.HostPathVolumeSource) source {
	kind := corev1.HostPathUnset
	if h.Type != nil {
		kind = *h.Type
	}
	if !path.IsAbs(h.Path) || slices.Contains(strings.Split(h.Path, "/"), "..") {
		t.invalid(at.Child("path"), h.Path, `must be an absolute path without ".."`)
	}
	oneOf(t, at.Child("type"), kind, slices.Sorted(maps.Keys(hostPathTypes))...)
	p.hostPaths = append(p.hostPaths, hostPath{at.Child("path"), h.Path, kind})
	return source{path: h.Path}
}

func (t *translator) checkEmptyDir(at *field.Path, e *corev1.EmptyDirVolumeSource) {
	if e == nil {
		return
	}
	oneOf(t, at.Child("medium"), string(e.Medium))
	if e.SizeLimit != nil {
		t.errs = append(t.errs, field.Forbidden(at.Child("sizeLimit"), "not supported without a cluster"))
	}
}

// tokenPath is where a cluster mounts the token of the service account.
const tokenPath = "/var/run/secrets/kubernetes.io/serviceaccount"

// tokenSources are the sources of the volume that a cluster adds to each pod, the token first.
var tokenSources = []corev1.VolumeProjection{
	{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
	{ConfigMap: &corev1.ConfigMapProjection{
		LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"},
		Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
	}},
	{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
		{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}},
	}}},
}

// planProjected accepts only the volume that a cluster adds to each pod.
func (t *translator) planProjected(at *field.Path, p *corev1.ProjectedVolumeSource) source {
	sources := p.DeepCopy().Sources
	if len(sources) > 0 && sources[0].ServiceAccountToken != nil {
		sources[0].ServiceAccountToken.ExpirationSeconds = nil // differs between clusters
	}
	if !reflect.DeepEqual(sources, tokenSources) {
		t.errs = append(t.errs, field.Forbidden(at, "not supported without a cluster"))
		return source{}
	}
	t.ignored["spec.volumes[].projected"] = true
	return source{absent: true}
}

// defaultFileMode is the mode of files of ConfigMaps and Secrets, as in Kubernetes.
const defaultFileMode = 0o644

// planFiles plans the files of a ConfigMap or a Secret.
func (t *translator) planFiles(at *field.Path, p *Pod, dir string, files map[string][]byte, missing *field.Error, items []corev1.KeyToPath,
	mode *int32, optional *bool) source {
	if missing != nil {
		t.errs = append(t.errs, missing)
		return source{readonly: true}
	}
	v := &volume{path: dir, mode: 0o755, group: t.podSecurity().FSGroup}
	if items == nil {
		for _, key := range slices.Sorted(maps.Keys(files)) {
			items = append(items, corev1.KeyToPath{Key: key, Path: key})
		}
	}
	for i, item := range items {
		at := at.Child("items").Index(i)
		content, exists := files[item.Key]
		switch {
		case !filepath.IsLocal(item.Path) || item.Path == ".":
			t.invalid(at.Child("path"), item.Path, "must be a path below the volume")
		case !exists && !isSet(optional):
			t.errs = append(t.errs, field.NotFound(at.Child("key"), item.Key))
		case exists:
			v.files = append(v.files, file{name: path.Clean(item.Path), mode: t.fileMode(at, or(item.Mode, mode)), data: content})
		}
	}
	p.volumes = append(p.volumes, v)
	return source{path: dir, readonly: true, own: true, files: v.files}
}

func (t *translator) fileMode(at *field.Path, mode *int32) fs.FileMode {
	if mode == nil {
		return defaultFileMode
	}
	if *mode < 0 || *mode > 0o777 {
		t.invalid(at.Child("mode"), fmt.Sprintf("%#o", *mode), "must be between 0 and 0777")
	}
	return fs.FileMode(*mode)
}

// hosts is a file /etc/hosts of the pod.
type hosts struct {
	path        string
	name        string
	hostNetwork bool
	aliases     []corev1.HostAlias
}

// planHosts plans a file for a pod with aliases. For other pods, the runtime makes one.
func (t *translator) planHosts(p *Pod) {
	if len(t.pod.Spec.HostAliases) == 0 {
		return
	}
	for i, a := range t.pod.Spec.HostAliases {
		at := field.NewPath("spec", "hostAliases").Index(i)
		if _, err := netip.ParseAddr(a.IP); err != nil {
			t.invalid(at.Child("ip"), a.IP, "is not an IP address")
		}
		for j, name := range a.Hostnames {
			t.check(at.Child("hostnames").Index(j), name, validation.IsDNS1123Subdomain(name))
		}
	}
	p.hosts = &hosts{path: path.Join(p.dir, "etc-hosts"), name: p.Sandbox.GetHostname(), hostNetwork: t.pod.Spec.HostNetwork,
		aliases: t.pod.Spec.HostAliases}
}

func (h *hosts) mounts() []*runtimeapi.Mount {
	if h == nil {
		return nil
	}
	return []*runtimeapi.Mount{{ContainerPath: "/etc/hosts", HostPath: h.path, SelinuxRelabel: true}}
}

// content returns the file of a pod with the given addresses. It begins with the node's file if the pod is on the node's
// network.
func (h *hosts) content(node []byte, ips []string) []byte {
	var b strings.Builder
	if h.hostNetwork {
		b.Write(node)
	} else {
		b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
		for _, ip := range ips {
			fmt.Fprintf(&b, "%s\t%s\n", ip, h.name)
		}
	}
	for _, a := range h.aliases {
		fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, "\t"))
	}
	return []byte(b.String())
}
