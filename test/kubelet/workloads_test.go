package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestDeployment updates a Deployment and scales it to zero and back.
func TestDeployment(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.deployment(k.replicas))
		before := n.WaitPods("app=web", k.replicas, k.boots)
		n.Kubectl("set", "env", "deployment/web", "VERSION=2")
		n.Kubectl("rollout", "status", "deployment/web", "--timeout", (2 * k.boots).String())
		after := n.WaitPods("app=web", k.replicas, k.boots)
		for _, old := range before {
			if slices.ContainsFunc(after, func(p corev1.Pod) bool { return p.UID == old.UID }) {
				t.Errorf("pod %s still exists after the update", old.Name)
			}
		}
		n.Kubectl("scale", "deployment/web", "--replicas=0")
		n.WaitPods("app=web", 0, kube.Timeout)
		n.Kubectl("scale", "deployment/web", fmt.Sprint("--replicas=", k.replicas))
		n.WaitPods("app=web", k.replicas, k.boots)
	})
}

// job is a Job with placeholders for the name and the container.
const job = `
apiVersion: batch/v1
kind: Job
metadata: {name: %s}
spec:
  completions: 3
  parallelism: 2
  backoffLimit: 2
  template:
    spec:
      runtimeClassName: RUNTIME
      restartPolicy: Never
      containers: [{name: c, resources: RESOURCES, %s}]
`

func TestJob(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(fmt.Sprintf(job, "well", k.prints)))
		done := waitJob(n, "well", batchv1.JobComplete)
		if done.Status.Succeeded != 3 || done.Status.Failed != 0 {
			t.Errorf("status of the Job: got %d succeeded, %d failed; want 3 and 0", done.Status.Succeeded, done.Status.Failed)
		}
		pods := n.Pods("job-name=well")
		if len(pods) != 3 {
			t.Errorf("pods of the Job: got %d, want 3", len(pods))
		}
		if k.name == "vm" {
			return // the log also contains output of the firmware
		}
		for _, p := range pods {
			if log := n.Kubectl("logs", p.Name); log != "done\n" {
				t.Errorf("log of %s: got %q, want %q", p.Name, log, "done\n")
			}
		}
		n.Apply(k.fill(fmt.Sprintf(job, "badly", k.fails)))
		if failed := waitJob(n, "badly", batchv1.JobFailed); failed.Status.Succeeded != 0 || failed.Status.Failed < 3 {
			t.Errorf("status of the failing Job: got %d succeeded, %d failed; want 0 and 3", failed.Status.Succeeded, failed.Status.Failed)
		}
		for _, p := range n.Pods("job-name=badly") {
			if end := p.Status.ContainerStatuses[0].State.Terminated; end == nil || end.ExitCode != 3 {
				t.Errorf("pod of the failing Job: got %s, want exit code 3", kube.Describe(&p))
			}
		}
	})
}

func waitJob(n *kube.Namespace, name string, condition batchv1.JobConditionType) *batchv1.Job {
	var j batchv1.Job
	n.Await("the Job "+name+" is "+string(condition), 2*kube.Timeout, func() error {
		j = batchv1.Job{}
		if err := n.Get("apis/batch/v1:jobs/"+name, &j); err != nil {
			return err
		}
		for _, c := range j.Status.Conditions {
			if c.Type == condition && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("status of the Job: got %+v", j.Status)
	})
	return &j
}

func TestCronJob(t *testing.T) {
	forKinds(t, kinds[:2], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: batch/v1
kind: CronJob
metadata: {name: minutely}
spec:
  schedule: "* * * * *"
  concurrencyPolicy: Forbid
  jobTemplate:
    spec:
      template:
        metadata: {labels: {app: minutely}}
        spec:
          runtimeClassName: RUNTIME
          restartPolicy: OnFailure
          containers: [{name: c, ` + k.prints + `}]
`))
		n.Await("a pod of the CronJob has ended", 3*time.Minute, func() error {
			for _, p := range n.Pods("app=minutely") {
				if p.Status.Phase == corev1.PodSucceeded {
					return nil
				}
			}
			return fmt.Errorf("none of %d pods has succeeded", len(n.Pods("app=minutely")))
		})
	})
}

func TestDaemonSet(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      runtimeClassName: RUNTIME
      terminationGracePeriodSeconds: GRACE
      containers: [{name: web, image: WEB, resources: RESOURCES, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}]
`))
		first := n.WaitPods("app=web", 1, k.boots)[0]
		n.Kubectl("set", "env", "daemonset/web", "VERSION=2")
		n.Kubectl("rollout", "status", "daemonset/web", "--timeout", (2 * k.boots).String())
		if next := n.WaitPods("app=web", 1, k.boots)[0]; next.UID == first.UID {
			t.Errorf("pod after the update: got the old pod %s, want a new one", next.Name)
		}
	})
}

// TestStatefulSet: each replica has its own volume, and gets the same volume after its pod was deleted.
func TestStatefulSet(t *testing.T) {
	writes := map[string]string{
		"linux": `image: BUSYBOX, command: [sh, -c, "echo $HOSTNAME >>/data/starts; trap exit TERM; sleep 3600 & wait"]`,
		"wasm":  `image: ` + harness.CommandGo + `, args: [ls, /data, write, /data/$(POD), x, ls, /data, sleep, 1h]`,
	}
	forKinds(t, kinds[:2], func(t *testing.T, k kind, n *kube.Namespace) {
		const replicas = 2
		dir := filepath.Join(n.Cluster.Dir, "volumes", n.Name)
		for i := range replicas {
			n.Apply(volume(t, n.Name, dir, i))
		}
		t.Cleanup(func() { n.Kubectl("delete", "pv", "--selector", "of="+n.Name, "--wait=false") })
		n.Apply(k.fill(`
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 2
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      runtimeClassName: RUNTIME
      terminationGracePeriodSeconds: 5
      containers:
      - {name: c, ` + writes[k.name] +
			`, env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}], volumeMounts: [{name: data, mountPath: /data}]}
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], storageClassName: ` + n.Name + `, resources: {requests: {storage: 1Mi}}}
`))
		first := n.WaitPods("app=db", replicas, k.boots)
		n.Kubectl("delete", "pod", "db-0")
		next := n.WaitPods("app=db", replicas, k.boots)
		if next[0].UID == first[0].UID || next[1].UID != first[1].UID {
			t.Errorf("pods after the deletion of db-0: got %s and %s, want a new db-0 and the same db-1", next[0].UID, next[1].UID)
		}
		switch k.name {
		case "linux":
			if starts := n.Kubectl("exec", "db-0", "--", "cat", "/data/starts"); starts != "db-0\ndb-0\n" {
				t.Errorf("volume of db-0: got %q, want a line for each of two starts", starts)
			}
		case "wasm":
			n.WaitLog("db-0\ndb-0\n", kube.Timeout, "db-0") // listed before and after the second write
		}
		n.Kubectl("scale", "statefulset/db", "--replicas=0")
		n.WaitPods("app=db", 0, kube.Timeout)
	})
}

// volume returns a local PersistentVolume of a class, and creates its directory, which is writable for everyone.
func volume(t *testing.T, class, dir string, i int) string {
	t.Helper()
	dir = filepath.Join(dir, fmt.Sprint(i))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { // because the umask limits the mode of MkdirAll
		t.Fatal(err)
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[1]s-%[2]d, labels: {of: %[1]s}}
spec:
  storageClassName: %[1]s
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  local: {path: %[3]s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[4]s]}]}]}}
`, class, i, dir, kube.NodeName)
}

// TestStaticPod: the kubelet runs a static pod from a file, and deleting its mirror pod does not end it.
func TestStaticPod(t *testing.T) {
	forKinds(t, kinds[:2], func(t *testing.T, k kind, n *kube.Namespace) {
		file := filepath.Join(n.Cluster.Dir, "manifests", n.Name+".yaml")
		pod := strings.TrimSpace(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: static, namespace: NAMESPACE}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers: [{name: web, image: WEB, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}]
`))
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(pod, "NAMESPACE", n.Name)), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(file) })
		name := "static-" + kube.NodeName
		mirror := n.WaitReady(name, k.boots)
		n.Kubectl("delete", "pod", name)
		again := n.WaitReady(name, k.boots)
		if again.UID == mirror.UID || again.Status.ContainerStatuses[0].ContainerID != mirror.Status.ContainerStatuses[0].ContainerID {
			t.Errorf("mirror pod after the deletion: got %s, want a new mirror of the same container as %s", kube.Describe(again),
				kube.Describe(mirror))
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		n.WaitGone("pods/"+name, kube.Timeout)
	})
}
