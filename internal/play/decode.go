package play

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// decoder reads objects of the API group v1. Unknown fields and duplicate keys are errors.
var decoder = func() runtime.Decoder {
	scheme := runtime.NewScheme()
	utilruntime.Must(corev1.AddToScheme(scheme))
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
}()

// Manifests are the objects of a file.
type Manifests struct {
	pods       []*corev1.Pod
	configMaps map[objectKey]data
	secrets    map[objectKey]data
}

// data is what a ConfigMap or a Secret contains.
type data struct {
	values map[string][]byte // for variables
	files  map[string][]byte // for volumes
}

// objectKey identifies an object among those of its kind.
type objectKey struct{ namespace, name string }

// Parse reads a file: YAML documents or JSON, each a Pod, a ConfigMap, a Secret or a List of these.
func Parse(text []byte) (*Manifests, error) {
	m := &Manifests{configMaps: map[objectKey]data{}, secrets: map[objectKey]data{}}
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for n := 1; ; n++ {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = m.add(document)
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w: %w", n, err, errdefs.ErrInvalidArgument)
		}
	}
	if len(m.pods) == 0 {
		return nil, fmt.Errorf("no Pod in it: %w", errdefs.ErrInvalidArgument)
	}
	return m, nil
}

// add adds the object in a document, or those of a List.
func (m *Manifests) add(document []byte) error {
	encoded, err := yaml.ToJSON(document)
	if err != nil {
		return err
	}
	if string(encoded) == "null" {
		return nil // only comments
	}
	object, _, err := decoder.Decode(document, nil, nil)
	if err != nil && !runtime.IsNotRegisteredError(err) {
		return err
	}
	switch o := object.(type) {
	case *corev1.Pod:
		return m.addPod(o)
	case *corev1.ConfigMap:
		values := bytesOf(o.Data)
		files := maps.Clone(values)
		maps.Copy(files, o.BinaryData)
		return addData(m.configMaps, "ConfigMap", keyOf(o.Namespace, o.Name), data{values, files})
	case *corev1.Secret:
		values := map[string][]byte{}
		maps.Copy(values, o.Data)
		maps.Copy(values, bytesOf(o.StringData)) // takes precedence
		return addData(m.secrets, "Secret", keyOf(o.Namespace, o.Name), data{values, values})
	case *corev1.List:
		for i, item := range o.Items {
			if err := m.add(item.Raw); err != nil {
				return fmt.Errorf("items[%d]: %w", i, err)
			}
		}
		return nil
	}
	var kind metav1.TypeMeta
	if err := json.Unmarshal(encoded, &kind); err != nil {
		return err
	}
	return fmt.Errorf("%s %s is none of Pod, ConfigMap, Secret and List", kind.APIVersion, kind.Kind)
}

func (m *Manifests) addPod(pod *corev1.Pod) error {
	key := keyOf(pod.Namespace, pod.Name)
	for _, other := range m.pods {
		if keyOf(other.Namespace, other.Name) == key {
			return fmt.Errorf("pod %s/%s is defined twice", key.namespace, key.name)
		}
	}
	pod.Namespace = key.namespace
	m.pods = append(m.pods, pod)
	return nil
}

func addData(all map[objectKey]data, kind string, key objectKey, d data) error {
	if key.name == "" {
		return fmt.Errorf("a %s without metadata.name", kind)
	}
	if _, exists := all[key]; exists {
		return fmt.Errorf("%s %s/%s is defined twice", kind, key.namespace, key.name)
	}
	all[key] = d
	return nil
}

func bytesOf(text map[string]string) map[string][]byte {
	all := map[string][]byte{}
	for k, v := range text {
		all[k] = []byte(v)
	}
	return all
}

func keyOf(namespace, name string) objectKey {
	if namespace == "" {
		namespace = corev1.NamespaceDefault
	}
	return objectKey{namespace, name}
}
