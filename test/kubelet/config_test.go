package kubelet

import (
	"encoding/base64"
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// configured is the pod of TestConfiguration, with a ConfigMap and a Secret as volumes and as variables, and fields
// from the downward API.
const configured = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {color: blue}
---
apiVersion: v1
kind: Secret
metadata: {name: password}
stringData: {word: open sesame}
---
apiVersion: v1
kind: Pod
metadata: {name: reader, labels: {tier: front}, annotations: {note: of the pod}}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers:
  - name: c
    CONTAINER
    resources: {requests: {cpu: 100m}, limits: {memory: 128Mi}}
    env:
    - {name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}}
    - {name: WORD, valueFrom: {secretKeyRef: {name: password, key: word}}}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: MEMORY, valueFrom: {resourceFieldRef: {resource: limits.memory}}}
    volumeMounts:
    - {name: settings, mountPath: /config/settings}
    - {name: password, mountPath: /config/password}
    - {name: about, mountPath: /config/about}
  volumes:
  - {name: settings, configMap: {name: settings}}
  - {name: password, secret: {secretName: password}}
  - {name: about, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: note, fieldRef: {fieldPath: "metadata.annotations['note']"}}]}}
`

// updateTimeout limits the time until a volume is updated. The kubelet syncs its pods every ten seconds here.
const updateTimeout = 2 * time.Minute

func TestConfiguration(t *testing.T) {
	// The component prints everything repeatedly, because no command can be run in it.
	look := "cat, /config/settings/color, out, '', cat, /config/password/word, out, '', cat, /config/about/labels, out, '', cat, /config/about/note, out, '', env, COLOR, env, WORD, env, POD_NAME, env, POD_IP, env, MEMORY, "
	watch := strings.Repeat("cat, /config/settings/color, out, '', sleep, 2s, ", 60)
	containers := map[string]string{
		"linux": `image: BUSYBOX, command: [sh, -c, "env; for f in /config/*/*; do cat $f; echo; done; trap exit TERM; while :; do cat /config/settings/color; echo; sleep 1; done"]`,
		"wasm":  `image: ` + harness.CommandGo + `, args: [` + look + watch + `out, end]`,
		"vm": `image: ` + harness.Guest +
			`, args: ['tripod.run="for f in /config/*/*; do cat $f; echo; done; set -a; . /etc/cloud/environment; env"']`,
	}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		container := strings.ReplaceAll(containers[k.name], ", image:", "\n    image:")
		container = strings.Replace(strings.Replace(container, ", command:", "\n    command:", 1), ", args:", "\n    args:", 1)
		n.Apply(k.fill(strings.Replace(configured, "CONTAINER", container, 1)))
		ip := n.WaitPhase("reader", corev1.PodRunning, k.boots).Status.PodIP
		for _, file := range []string{"blue", "open sesame", `tier="front"`, "of the pod"} {
			n.WaitLog(file, k.boots, "reader")
		}
		for name, value := range map[string]string{"COLOR": "blue", "WORD": "open sesame", "POD_NAME": "reader", "POD_IP": ip,
			"MEMORY": "134217728"} {
			want := name + "=" + value
			if k.name == "wasm" { // prints only the values
				want = "\n" + value + "\n"
			}
			n.WaitLog(want, k.boots, "reader")
		}
		if k.name == "vm" {
			return // files are copied into a machine at its creation
		}
		n.Kubectl("patch", "configmap", "settings", "--patch", `{"data": {"color": "green"}}`)
		n.WaitLog("green\n", updateTimeout, "reader")
	})
}

// TestProjectedToken: a pod's projected token names the pod, its service account and the audience.
func TestProjectedToken(t *testing.T) {
	containers := map[string]string{
		"linux": `image: BUSYBOX, command: [sh, -c, "cat /token/token; echo; cat /token/namespace; trap exit TERM; sleep 3600 & wait"]`,
		"wasm":  `image: ` + harness.CommandGo + `, args: [cat, /token/token, out, "", cat, /token/namespace, out, "", sleep, 1h]`,
		"vm":    `image: WEB, args: ['tripod.run="cat /token/token; echo; cat /token/namespace; echo"']`,
	}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: reader}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers: [{name: c, resources: RESOURCES, ` + containers[k.name] + `, volumeMounts: [{name: token, mountPath: /token}]}]
  volumes:
  - name: token
    projected:
      sources:
      - serviceAccountToken: {path: token, audience: tripod-test, expirationSeconds: 3600}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
`))
		log := n.WaitLog(n.Name, k.boots, "reader")
		token := regexp.MustCompile(`(?m)^[\w-]+\.([\w-]+)\.[\w-]+\s*$`).FindStringSubmatch(log)
		if token == nil {
			t.Fatalf("the pod's log has no token: %s", log)
		}
		text, err := base64.RawURLEncoding.DecodeString(token[1])
		if err != nil {
			t.Fatal(err)
		}
		var claims struct {
			Audience []string `json:"aud"`
			Subject  string   `json:"sub"`
			Of       struct {
				Pod struct{ UID string }
			} `json:"kubernetes.io"`
		}
		if err := json.Unmarshal(text, &claims); err != nil {
			t.Fatal(err)
		}
		pod := n.Pod("reader")
		if claims.Subject != "system:serviceaccount:"+n.Name+":default" || claims.Of.Pod.UID != string(pod.UID) ||
			claims.Audience[0] != "tripod-test" {
			t.Errorf("claims of the token: got %s, want the pod %s, its service account and the audience", text, pod.UID)
		}
	})
}
