package play

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// environment is the variables of a container, in the order in which they were first set.
type environment struct {
	names  []string
	values map[string]string
}

func (e *environment) set(name, value string) {
	if _, exists := e.values[name]; !exists {
		e.names = append(e.names, name)
	}
	e.values[name] = value
}

func (e *environment) list() (envs []*runtimeapi.KeyValue) {
	for _, name := range e.names {
		envs = append(envs, &runtimeapi.KeyValue{Key: name, Value: []byte(e.values[name])})
	}
	return envs
}

// expand replaces $(NAME) by the variable's value. $$ is a dollar sign, and unknown names stay as they are.
func (e *environment) expand(text string) string {
	return references().ReplaceAllStringFunc(text, func(match string) string {
		if match == "$$" {
			return "$"
		}
		if value, ok := e.values[match[2:len(match)-1]]; ok {
			return value
		}
		return match
	})
}

var references = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\$\$|\$\([^)]*\)`) })

func (e *environment) expandAll(words []string) (expanded []string) {
	for _, w := range words {
		expanded = append(expanded, e.expand(w))
	}
	return expanded
}

// environment returns the container's variables, in a pod with the given addresses: first those of envFrom, then those of
// env, which take precedence.
func (t *translator) environment(at *field.Path, c *corev1.Container, ips []string) (*environment, field.ErrorList) {
	env, errs := &environment{values: map[string]string{}}, field.ErrorList(nil)
	for i, from := range c.EnvFrom {
		data, err := t.envFrom(at.Child("envFrom").Index(i), from)
		if err != nil {
			errs = append(errs, err)
		}
		for _, key := range slices.Sorted(maps.Keys(data.values)) {
			env.set(from.Prefix+key, string(data.values[key]))
		}
	}
	for i, v := range c.Env {
		at := at.Child("env").Index(i)
		for _, message := range validation.IsRelaxedEnvVarName(v.Name) {
			errs = append(errs, field.Invalid(at.Child("name"), v.Name, message))
		}
		if v.ValueFrom == nil {
			env.set(v.Name, env.expand(v.Value))
			continue
		}
		if v.Value != "" {
			errs = append(errs, field.Invalid(at.Child("valueFrom"), "", "must not be set with value"))
		}
		value, found, err := t.valueFrom(at.Child("valueFrom"), v.ValueFrom, ips)
		if err != nil {
			errs = append(errs, err)
		}
		if found {
			env.set(v.Name, value)
		}
	}
	for _, name := range env.names {
		if strings.ContainsRune(env.values[name], 0) {
			errs = append(errs, field.Invalid(at.Child("env").Key(name), "", "has a zero byte"))
		}
	}
	return env, errs
}

func (t *translator) envFrom(at *field.Path, from corev1.EnvFromSource) (data, *field.Error) {
	switch {
	case from.ConfigMapRef != nil && from.SecretRef == nil:
		return t.data(at.Child("configMapRef"), t.configMaps, from.ConfigMapRef.Name, from.ConfigMapRef.Optional)
	case from.SecretRef != nil && from.ConfigMapRef == nil:
		return t.data(at.Child("secretRef"), t.secrets, from.SecretRef.Name, from.SecretRef.Optional)
	}
	return data{}, field.Required(at, "needs either configMapRef or secretRef")
}

// data returns the data of a ConfigMap or Secret of the file. An optional one that is missing has no data.
func (t *translator) data(at *field.Path, all map[objectKey]data, name string, optional *bool) (data, *field.Error) {
	found, exists := all[objectKey{t.pod.Namespace, name}]
	if !exists && !isSet(optional) {
		e := field.NotFound(at.Child("name"), name)
		e.Detail = "must be in the same file, in the namespace " + t.pod.Namespace
		return data{}, e
	}
	return found, nil
}

// valueFrom returns the value of a variable. It is not found if an optional source is missing.
func (t *translator) valueFrom(at *field.Path, from *corev1.EnvVarSource, ips []string) (value string, found bool, err *field.Error) {
	switch {
	case from.FieldRef != nil:
		value, err := t.podField(at.Child("fieldRef", "fieldPath"), from.FieldRef.FieldPath, ips)
		return value, err == nil, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		return t.value(at.Child("configMapKeyRef"), t.configMaps, ref.Name, ref.Key, ref.Optional)
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		return t.value(at.Child("secretKeyRef"), t.secrets, ref.Name, ref.Key, ref.Optional)
	}
	return "", false, nil // compare reports it
}

func (t *translator) value(at *field.Path, all map[objectKey]data, name, key string, optional *bool) (string, bool, *field.Error) {
	data, err := t.data(at, all, name, optional)
	if err != nil {
		return "", false, err
	}
	value, exists := data.values[key]
	if !exists && !isSet(optional) {
		return "", false, field.NotFound(at.Child("key"), key)
	}
	return string(value), exists, nil
}

// keyed matches a path to one label or annotation.
var keyed = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^metadata\.(labels|annotations)\['(.+)'\]$`) })

// podField returns the value of a field of the pod.
func (t *translator) podField(at *field.Path, name string, ips []string) (string, *field.Error) {
	if m := keyed().FindStringSubmatch(name); m != nil {
		if m[1] == "labels" {
			return t.pod.Labels[m[2]], nil
		}
		return t.pod.Annotations[m[2]], nil
	}
	switch name {
	case "metadata.name":
		return t.pod.Name, nil
	case "metadata.namespace":
		return t.pod.Namespace, nil
	case "metadata.uid":
		return t.uid, nil
	case "spec.nodeName":
		return t.options.NodeName, nil
	case "status.podIP", "status.podIPs":
		if t.pod.Spec.HostNetwork {
			return "", field.Invalid(at, name, "is not known with hostNetwork")
		}
		if name == "status.podIP" {
			ips = ips[:min(len(ips), 1)]
		}
		return strings.Join(ips, ","), nil
	}
	return "", field.Invalid(at, name, "is not known without a cluster")
}
