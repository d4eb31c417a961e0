package play

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the golden files")

func options() Options {
	return Options{NewUID: func() string { return "uid-1" }, NodeName: "node-1", LogDir: "/var/log/pods", VolumeDir: "/volumes"}
}

func plan(text string) ([]*Pod, error) {
	m, err := Parse([]byte(text))
	if err != nil {
		return nil, err
	}
	return m.Plan(options())
}

// TestGolden compares the plans of the manifests in testdata with the golden files beside them.
func TestGolden(t *testing.T) {
	manifests, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(manifests) < 2 {
		t.Fatalf("manifests in testdata: got %v, %v", manifests, err)
	}
	for _, name := range manifests {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pods, err := plan(string(text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := render(t, pods)
		golden := strings.TrimSuffix(name, ".yaml") + ".golden"
		if *update {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || string(got) != string(want) {
			t.Errorf("plan of %s differs from %s (error %v); see `go test -update`. Got:\n%s", name, golden, err, got)
		}
	}
}

// render formats plans as YAML, for pods whose addresses are 192.0.2.1 and 2001:db8::1.
func render(t *testing.T, pods []*Pod) []byte {
	t.Helper()
	ips := []string{"192.0.2.1", "2001:db8::1"}
	message := func(m proto.Message) json.RawMessage {
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	var all []any
	for _, p := range pods {
		var containers, volumes []any
		for _, c := range p.Containers {
			config := c.Config(&runtimeapi.Image{Id: "sha256:1"}, ips)
			envs := []string{}
			for _, e := range config.GetEnvs() {
				envs = append(envs, e.GetKey()+"="+string(e.GetValue()))
			}
			config.Envs = nil
			containers = append(containers,
				map[string]any{"role": c.Role, "pull": c.Pull, "nonRoot": c.NonRoot, "envs": envs, "config": message(config)})
		}
		for _, v := range p.volumes {
			files := []string{}
			for _, f := range v.files {
				files = append(files, f.mode.String()+" "+f.name+" "+string(f.data))
			}
			volumes = append(volumes, map[string]any{"path": v.path, "mode": v.mode.String(), "files": files})
		}
		pod := map[string]any{"handler": p.Handler, "grace": p.Grace.String(), "sandbox": message(p.Sandbox), "containers": containers,
			"volumes": volumes, "ignored": p.Ignored}
		if p.hosts != nil {
			pod["hosts"] = string(p.hosts.content([]byte("the node's\n"), ips))
		}
		all = append(all, pod)
	}
	text, err := yaml.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestEverythingIsTried: manifests in testdata have every accepted field, and every ignored one.
func TestEverythingIsTried(t *testing.T) {
	tried := func(file, path string) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if name := path[strings.LastIndexByte(path, '.')+1:]; !strings.Contains(string(text), name+":") {
			t.Errorf("%s lacks %s", file, path)
		}
	}
	for _, f := range accepted {
		tried("testdata/everything.yaml", f.path)
	}
	for _, f := range ignored {
		tried("testdata/kubectl-get.yaml", f.path)
	}
}

// TestDocumented: the page about manifests has the tables of fields, and an unsupported field is not in them.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/manifests.md")
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, f := range accepted {
		rows = append(rows, "| "+strings.TrimPrefix(f.path, "spec.")+" | "+f.effect+" |")
	}
	checkTable(t, string(text), rows)
	rows = nil
	for _, f := range ignored {
		values := "any"
		if f.values != nil {
			values = "`" + strings.Join(f.values, "`, `") + "`"
		}
		rows = append(rows, "| "+strings.TrimPrefix(f.path, "spec.")+" | "+values+" | "+f.why+" |")
	}
	checkTable(t, string(text), rows)
}

func checkTable(t *testing.T, page string, rows []string) {
	t.Helper()
	if table := strings.Join(rows, "\n"); !strings.Contains(page, table) {
		t.Errorf("docs/manifests.md does not have this table:\n%s", table)
	}
}

// pod returns a manifest whose spec is the container c with the given fields, and more fields of the pod.
func pod(container, spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers: [{name: c, image: i" + prefixed(", ", container) + "}]\n  " +
		spec
}

func prefixed(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

// TestRefused: what cannot be done is refused by its path, and nothing is ignored.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ manifest, want string }{
		{"", "no Pod in it"},
		{"a: [", "document 1: "},
		{"kind: Pod", "Object 'apiVersion' is missing"},
		{"apiVersion: v1\nkind: Service", "v1 Service is none of Pod, ConfigMap, Secret and List"},
		{"apiVersion: apps/v1\nkind: Deployment", "apps/v1 Deployment is none of"},
		{"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Node}]", "items[0]: v1 Node is none of"},
		{"apiVersion: v1\nkind: ConfigMap", "a ConfigMap without metadata.name"},
		{pod("", "") + "\n---\n" + pod("", ""), "document 2: pod default/p is defined twice"},
		{pod("", "hostnetwork: true"), `unknown field "spec.hostnetwork"`},
		{pod("imag: x", ""), `unknown field "spec.containers[0].imag"`},
		{pod("", "hostPID: true\n  hostPID: false"), `key "hostPID" already set`},
		{pod("", "hostPID: 1"), "cannot unmarshal number into Go struct field PodSpec.spec.hostPID"},

		{pod("", "volumes: [{name: v, nfs: {server: s, path: /p}}]"), "spec.volumes[0].nfs: Forbidden"},
		{pod("", "volumes: [{name: v, emptyDir: {medium: Memory}}]"), "spec.volumes[0].emptyDir.medium: Unsupported value"},
		{pod("", "volumes: [{name: v, emptyDir: {sizeLimit: 1Mi}}]"), "spec.volumes[0].emptyDir.sizeLimit: Forbidden"},
		{pod("", "volumes: [{name: v, hostPath: {path: a}}]"), "spec.volumes[0].hostPath.path: Invalid value"},
		{pod("", "volumes: [{name: v, hostPath: {path: /a, type: Pipe}}]"), "spec.volumes[0].hostPath.type: Unsupported value"},
		{pod("", "volumes: [{name: v, configMap: {name: m}}]"), "spec.volumes[0].configMap.name: Not found"},
		{pod("", "volumes: [{name: v, secret: {secretName: m}}]"), "spec.volumes[0].secret.secretName: Not found"},
		{pod("", "volumes: [{name: v, emptyDir: {}}, {name: v, emptyDir: {}}]"), "spec.volumes[1].name: Duplicate value"},
		{pod("volumeMounts: [{name: v, mountPath: /v}]", ""), "spec.containers[0].volumeMounts[0].name: Not found"},
		{pod("volumeMounts: [{name: v, mountPath: v}]", "volumes: [{name: v, emptyDir: {}}]"), "volumeMounts[0].mountPath: Invalid value"},
		{pod("volumeMounts: [{name: v, mountPath: /v, subPath: a}]", "volumes: [{name: v, emptyDir: {}}]"), "volumeMounts[0].subPath: Forbidden"},
		{pod("volumeMounts: [{name: v, mountPath: /v, subPathExpr: a}]", "volumes: [{name: v, emptyDir: {}}]"),
			"volumeMounts[0].subPathExpr: Forbidden"},
		{pod("volumeMounts: [{name: v, mountPath: /v, mountPropagation: Bidirectional}]", "volumes: [{name: v, emptyDir: {}}]"),
			"mountPropagation: Invalid value"},
		{pod("volumeMounts: [{name: v, mountPath: /v, recursiveReadOnly: Enabled}]", "volumes: [{name: v, emptyDir: {}}]"),
			"recursiveReadOnly: Invalid value"},

		{pod("", "volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: token, audience: vault}}]}}]"),
			"spec.volumes[0].projected: Forbidden"},
		{pod("volumeMounts: [{name: v, mountPath: /v}]", "volumes: ["+tokenVolume+"]"), "volumeMounts[0].mountPath: Invalid value"},

		{pod("livenessProbe: {}", ""), "spec.containers[0].livenessProbe: Forbidden"},
		{pod("lifecycle: {preStop: {sleep: {seconds: 1}}}", ""), "spec.containers[0].lifecycle.preStop: Forbidden"},
		{pod("lifecycle: {stopSignal: SIGNONE}", ""), "lifecycle.stopSignal: Invalid value"},
		{pod("restartPolicy: Always", ""), "spec.containers[0].restartPolicy: Forbidden"},
		{pod("env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}]", ""),
			"spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value"},
		{pod("env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]", "hostNetwork: true"), "is not known with hostNetwork"},
		{pod("env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}]", ""), "env[0].valueFrom.resourceFieldRef: Forbidden"},
		{pod("env: [{name: A, valueFrom: {configMapKeyRef: {name: m, key: k}}}]", ""), "env[0].valueFrom.configMapKeyRef.name: Not found"},
		{pod("env: [{name: 'A=', value: b}]", ""), "env[0].name: Invalid value"},
		{pod("envFrom: [{secretRef: {name: m}}]", ""), "envFrom[0].secretRef.name: Not found"},
		{pod("envFrom: [{prefix: A}]", ""), "envFrom[0]: Required value"},
		{pod("resources: {limits: {cpu: -1}}", ""), "resources.limits[cpu]: Invalid value"},
		{pod("resources: {limits: {cpu: 1}, requests: {cpu: 2}}", ""), "resources.requests[cpu]: Invalid value"},
		{pod("resources: {limits: {example.com/gpu: 1}}", ""), "resources.limits: Unsupported value"},
		{pod("ports: [{containerPort: 0}]", ""), "ports[0].containerPort: Invalid value"},
		{pod("ports: [{containerPort: 1, protocol: ICMP}]", ""), "ports[0].protocol: Unsupported value"},
		{pod("ports: [{containerPort: 1, hostPort: 2}]", "hostNetwork: true"), "ports[0].hostPort: Invalid value"},
		{pod("ports: [{containerPort: 1, hostIP: here}]", ""), "ports[0].hostIP: Invalid value"},
		{pod("securityContext: {procMount: Unmasked}", ""), "securityContext.procMount: Unsupported value"},
		{pod("securityContext: {seccompProfile: {type: Localhost, localhostProfile: p}}", ""), "seccompProfile.localhostProfile: Forbidden"},
		{pod("securityContext: {appArmorProfile: {type: Localhost}}", ""), "appArmorProfile.localhostProfile: Invalid value"},
		{pod("securityContext: {privileged: true, allowPrivilegeEscalation: false}", ""), "allowPrivilegeEscalation: Invalid value"},
		{pod("securityContext: {runAsUser: 0, runAsNonRoot: true}", ""), "securityContext.runAsUser: Invalid value"},
		{pod("imagePullPolicy: Sometimes", ""), "imagePullPolicy: Unsupported value"},
		{strings.Replace(pod("", ""), "image: i", "image: 'I I'", 1), "spec.containers[0].image: Invalid value"},
		{strings.Replace(pod("", ""), ", image: i", "", 1), "spec.containers[0].image: Required value"},
		{pod("", "initContainers: [{name: c, image: i}]"), "spec.containers[0].name: Duplicate value"},
		{pod("", "initContainers: [{name: d, image: i, restartPolicy: Never}]"), "spec.initContainers[0].restartPolicy: Unsupported value"},
		{pod("", "initContainers: [{name: d, image: i, startupProbe: {}}]"), "spec.initContainers[0].startupProbe: Forbidden"},
		{"apiVersion: v1\nkind: Pod\nmetadata: {name: p}", "spec.containers: Required value"},

		{pod("", "restartPolicy: OnFailure"), `spec.restartPolicy: Unsupported value: "OnFailure": supported values: "Always", "Never"`},
		{pod("", "nodeSelector: {a: b}"), "spec.nodeSelector: Forbidden"},
		{pod("", "serviceAccountName: robot"), `spec.serviceAccountName: Unsupported value: "robot": supported values: "default"`},
		{pod("", "setHostnameAsFQDN: true"), "spec.setHostnameAsFQDN: Unsupported value"},
		{pod("terminationMessagePath: /run/why", ""), "spec.containers[0].terminationMessagePath: Unsupported value"},
		{pod("", "initContainers: [{name: d, image: i, terminationMessagePolicy: Logs}]"),
			"spec.initContainers[0].terminationMessagePolicy: Unsupported value"},
		{pod("", "imagePullSecrets: [{name: s}]"), "spec.imagePullSecrets: Forbidden"},
		{pod("", "dnsPolicy: ClusterFirstWithHostNet"), "spec.dnsPolicy: Unsupported value"},
		{pod("", "dnsPolicy: None"), "spec.dnsConfig.nameservers: Required value"},
		{pod("", "dnsConfig: {nameservers: [192.0.2.1]}"), "spec.dnsPolicy: Invalid value"},
		{pod("", "hostAliases: [{ip: here, hostnames: [a b]}]"), "spec.hostAliases[0].hostnames[0]: Invalid value"},
		{pod("", "terminationGracePeriodSeconds: -1"), "spec.terminationGracePeriodSeconds: Invalid value"},
		{pod("", "os: {name: windows}"), "spec.os.name: Unsupported value"},
		{pod("", "hostname: A"), "spec.hostname: Invalid value"},
		{pod("", "hostPID: true\n  shareProcessNamespace: true"), "spec.shareProcessNamespace: Invalid value"},
		{pod("", "securityContext: {supplementalGroupsPolicy: Some}"), "spec.securityContext.supplementalGroupsPolicy: Unsupported value"},
		{strings.Replace(pod("", ""), "name: p", "name: P", 1), "metadata.name: Invalid value"},
		{strings.Replace(pod("", "affinity: {}"), "name: p", "uid: u", 1), "spec.affinity: Forbidden"},
		{strings.Replace(pod("", "affinity: {}"), "name: p", "uid: u", 1), "metadata.name: Required value"}, // all problems are reported
	} {
		pods, err := plan(c.manifest)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("manifest\n%s\ngot %d pods and error %v, want an invalid argument with %q", c.manifest, len(pods), err, c.want)
		}
	}
}

// tokenVolume is the volume v as a cluster adds it to each pod.
const tokenVolume = `{name: v, projected: {defaultMode: 420, sources: [{serviceAccountToken: {expirationSeconds: 3607, path: token}},
    {configMap: {items: [{key: ca.crt, path: ca.crt}], name: kube-root-ca.crt}},
    {downwardAPI: {items: [{fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}, path: namespace}]}}]}}`

// TestDefaultsAreAsLeftOut: a field that has the default of the API gives the plan of the manifest without it, and is
// named if it has no effect.
func TestDefaultsAreAsLeftOut(t *testing.T) {
	for _, c := range []struct{ container, spec, ignored string }{
		{"", "restartPolicy: Always", "[spec.restartPolicy: Always]"},
		{"", "dnsPolicy: ClusterFirst", "[spec.dnsPolicy: ClusterFirst]"},
		{"", "schedulerName: default-scheduler", "[spec.schedulerName]"},
		{"", "serviceAccountName: default\n  serviceAccount: default", "[spec.serviceAccount: default spec.serviceAccountName: default]"},
		{"", "automountServiceAccountToken: true", "[spec.automountServiceAccountToken: true]"},
		{"", "enableServiceLinks: true", "[spec.enableServiceLinks]"},
		{"", "priority: 0\n  preemptionPolicy: PreemptLowerPriority", "[spec.preemptionPolicy: PreemptLowerPriority spec.priority]"},
		{"", "setHostnameAsFQDN: false", "[spec.setHostnameAsFQDN: false]"},
		{"terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File", "",
			"[spec.containers[].terminationMessagePath: /dev/termination-log spec.containers[].terminationMessagePolicy: File]"},
		{"volumeMounts: [{name: v, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}]", "volumes: [" + tokenVolume + "]",
			"[spec.volumes[].projected]"},
		{"imagePullPolicy: Always, resources: {}, securityContext: {}",
			"securityContext: {}\n  terminationGracePeriodSeconds: 30\n  tolerations: []\n  nodeSelector: {}", "[]"},
	} {
		want, err := plan(pod("", ""))
		if err != nil {
			t.Fatal(err)
		}
		got, err := plan(pod(c.container, c.spec))
		if err != nil {
			t.Errorf("%s %s: got error %v, want none", c.container, c.spec, err)
			continue
		}
		if names := fmt.Sprint(got[0].Ignored); names != c.ignored {
			t.Errorf("%s %s: ignored fields: got %s, want %s", c.container, c.spec, names, c.ignored)
		}
		got[0].Ignored = nil
		if g, w := string(render(t, got)), string(render(t, want)); g != w {
			t.Errorf("%s %s: got the plan\n%s\nwant that of the manifest without it:\n%s", c.container, c.spec, g, w)
		}
	}
}

// TestUserOfTheImage: without a user, the image's is sent, as by a kubelet. A group without a user is not sent to the
// sandbox, which has no image.
func TestUserOfTheImage(t *testing.T) {
	uid := func(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }
	for _, c := range []struct {
		container, spec string
		image           *runtimeapi.Image
		want            string
	}{
		{"", "securityContext: {runAsGroup: 7}", &runtimeapi.Image{}, "0  7"},
		{"securityContext: {runAsGroup: 7}", "", &runtimeapi.Image{Uid: uid(1234)}, "1234  7"},
		{"securityContext: {runAsGroup: 7}", "securityContext: {runAsGroup: 8}", &runtimeapi.Image{Username: "app"}, "none app 7"},
		{"securityContext: {runAsUser: 5}", "securityContext: {runAsGroup: 7}", &runtimeapi.Image{Uid: uid(1234)}, "5  7"},
		{"", "securityContext: {runAsGroup: 7, runAsNonRoot: true}", &runtimeapi.Image{Uid: uid(1234)}, "1234  7"},
		{"", "securityContext: {supplementalGroups: [9]}", &runtimeapi.Image{Uid: uid(1234)}, "1234  none"},
		{"", "", &runtimeapi.Image{Username: "app"}, "none app none"},
	} {
		pods, err := plan(pod(c.container, c.spec))
		if err != nil {
			t.Errorf("%s %s: got error %v, want none", c.container, c.spec, err)
			continue
		}
		sc := pods[0].Containers[0].Config(c.image, nil).GetLinux().GetSecurityContext()
		if got := fmt.Sprint(text(sc.GetRunAsUser()), " ", sc.GetRunAsUsername(), " ", text(sc.GetRunAsGroup())); got != c.want {
			t.Errorf("%s %s with image %v: user and group: got %q, want %q", c.container, c.spec, c.image, got, c.want)
		}
		if s := pods[0].Sandbox.GetLinux().GetSecurityContext(); s.GetRunAsGroup() != nil {
			t.Errorf("%s %s: sandbox: got group %v without a user", c.container, c.spec, s.GetRunAsGroup())
		}
	}
}

func text(id *runtimeapi.Int64Value) string {
	if id == nil {
		return "none"
	}
	return fmt.Sprint(id.GetValue())
}

func TestExpand(t *testing.T) {
	e := &environment{values: map[string]string{"A": "1", "B": "$(A)"}}
	for text, want := range map[string]string{
		"": "", "$(A)$(B)": "1$(A)", "$$(A)": "$(A)", "$$$(A)": "$1", "$(C)": "$(C)", "$A $( $": "$A $( $", "$()": "$()",
	} {
		if got := e.expand(text); got != want {
			t.Errorf("expand(%q): got %q, want %q", text, got, want)
		}
	}
}

func TestPullPolicy(t *testing.T) {
	for image, want := range map[string]string{
		"nginx": "Always", "nginx:latest": "Always", "nginx:1": "IfNotPresent", "localhost:5000/nginx": "Always",
		"nginx@sha256:f1e2d3c4b5a697887766554433221100f1e2d3c4b5a697887766554433221100": "IfNotPresent",
	} {
		pods, err := plan(strings.Replace(pod("", ""), "image: i", "image: '"+image+"'", 1))
		if err != nil {
			t.Fatal(err)
		}
		if got := string(pods[0].Containers[0].Pull); got != want {
			t.Errorf("pull policy of %s: got %s, want %s", image, got, want)
		}
	}
}
