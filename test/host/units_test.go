package host

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

// Images of the three kinds of pod.
const (
	nginx   = "registry.k8s.io/e2e-test-images/nginx:1.14-2"
	busybox = "registry.k8s.io/e2e-test-images/busybox:1.29-2"
	greeter = "images.test/tripod/wasm/greeter-c:1"
	disk    = "images.test/tripod/vm/disk:1"
)

// answers is a shell command that waits until the daemon answers. The daemon's socket stays over a restart, so one call that is
// answered is one of the new daemon's.
const answers = "timeout 60 sh -c 'until tripod info >/dev/null 2>&1; do sleep 0.2; done'"

// runThree runs a pod of each kind, with names that end in the given suffix, and returns the names.
func runThree(t *testing.T, suffix string) []string {
	t.Helper()
	names := []string{"web" + suffix, "component" + suffix, "machine" + suffix}
	node.run(t, "tripod run --name %s %s; tripod run --runtime wasm --name %s %s; tripod run --runtime vm --name %s %s",
		names[0], nginx, names[1], greeter, names[2], disk)
	t.Cleanup(func() { _, _ = node.try(t, "tripod rmp --all --force") })
	return names
}

// wantReady waits until the daemon answers, and checks that these pods and their containers run.
func wantReady(t *testing.T, names ...string) {
	t.Helper()
	out := node.run(t, answers+"; tripod pods; tripod ps")
	for _, name := range names {
		if !regexp.MustCompile(`Ready +`+name+` `).MatchString(out) || !regexp.MustCompile(`Running .* `+name+"\n").MatchString(out) {
			t.Errorf("pod %s does not run:\n%s", name, out)
		}
	}
}

// TestHelpersHaveTheirOwnUnit: the daemon's service has the daemon only, so that restarts and kills of the service concern
// nothing else, and systemd says nothing alarming about them.
func TestHelpersHaveTheirOwnUnit(t *testing.T) {
	names := runThree(t, "")
	node.run(t, "tripod exec web true")             // starts a carrier of sessions
	until.NoError(t, 15*time.Second, func() error { // what the daemon runs for a moment, such as a CNI plugin, may be there
		out := node.run(t, "cat /sys/fs/cgroup/system.slice/tripod.service/cgroup.procs; find /sys/fs/cgroup/system.slice/tripod.service -mindepth 1 -type d")
		if strings.Count(out, "\n") != 1 {
			return fmt.Errorf("processes and cgroups of the daemon's service: got %q, want the daemon's PID only", out)
		}
		return nil
	})
	for _, helper := range []string{"conmon", "wasm-node.1", "sessions"} {
		if out := node.run(t, "cat /sys/fs/cgroup/tripod.slice/tripod-helpers.service/tripod-%s/cgroup.procs || true", helper); out == "" {
			t.Errorf("no process of %s among the helpers", helper)
		}
	}
	since := strings.TrimSpace(node.run(t, "date +%%s"))
	for i := range 10 {
		if i%2 == 0 {
			node.run(t, "systemctl restart tripod")
		} else {
			node.run(t, "systemctl kill --signal KILL tripod")
		}
		wantReady(t, names...)
	}
	// What systemd says of a service that was killed is not about its helpers.
	log := node.run(t, "journalctl --no-pager --quiet --since @%s --priority warning _PID=1 | grep tripod | grep -vE 'Failed with result .signal.|Main process exited' || true", since)
	if log != "" {
		t.Errorf("systemd warns about ten restarts:\n%s", log)
	}
}

// snapshot names what pods must not leave behind: units, cgroups, mounts, links, rules and processes. The slice of a kind is the
// node's, like its bridge.
func snapshot(t *testing.T) []string {
	t.Helper()
	out := node.run(t, `
	systemctl list-units --all --plain --no-legend 'tripod*' | cut -d' ' -f1 | grep -vxE 'tripod-(vm|wasm).slice' | sed 's/^/unit /'
	find /sys/fs/cgroup -type d -name '*tripod*' ! -name tripod-vm.slice ! -name tripod-wasm.slice -printf 'cgroup %%p\n'
	grep tripod /proc/self/mountinfo | cut -d' ' -f5 | sed 's/^/mount /'
	ip -o link | cut -d: -f2 | sed 's/@.*//; s/^/link/'
	iptables-save | grep ^-A | sed 's/^/rule /'
	ls /var/lib/tripod/linux /run/tripod/netns /var/lib/cni 2>/dev/null | sed 's/^/file /'
	for exe in conmon qemu-system-x86_64 virtiofsd catatonit; do pgrep -x $exe | sed "s/^/process $exe /"; done || true`)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	slices.Sort(lines)
	return slices.Compact(lines)
}

// wantNothingLeft waits until what is there is what was there before.
func wantNothingLeft(t *testing.T, before []string) {
	t.Helper()
	until.NoError(t, 15*time.Second, func() error {
		left := slices.DeleteFunc(snapshot(t), func(line string) bool {
			_, found := slices.BinarySearch(before, line)
			return found
		})
		if len(left) > 0 {
			return fmt.Errorf("left behind:\n%s", strings.Join(left, "\n"))
		}
		return nil
	})
}

// TestNothingIsLeft: whatever the order in which pods are made, stopped and removed and the daemon is killed and restarted, no
// unit, cgroup, mount, link, rule or process of a pod stays.
func TestNothingIsLeft(t *testing.T) {
	runThree(t, "-first") // what belongs to the node, such as the bridge and the shared worker, comes with the first pods
	node.run(t, "tripod rmp --all --force")
	before := snapshot(t)
	const kill, restart = "systemctl kill --signal KILL tripod; " + answers + "; ", "systemctl restart tripod; "
	for name, order := range map[string]string{
		"removed":                "tripod rmp --all --force",
		"stopped, removed":       "tripod stopp $(tripod pods --quiet); tripod rmp --all",
		"kill, removed":          kill + "tripod rmp --all --force",
		"restart, removed":       restart + "tripod rmp --all --force",
		"stopped, kill, removed": "tripod stopp $(tripod pods --quiet); " + kill + "tripod rmp --all --force",
		"kill during removal, removed": "(sleep 0.5; systemctl kill --signal KILL tripod) & tripod rmp --all --force; wait; " + answers +
			"; tripod rmp --all --force",
		"processes killed, removed":     "pkill -KILL -x nginx; pkill -KILL -x qemu-system-x86; tripod rmp --all --force",
		"daemon and processes, removed": "systemctl kill --signal KILL tripod; pkill -KILL -x conmon; pkill -KILL -x nginx; pkill -KILL -x qemu-system-x86; " + answers + "; tripod rmp --all --force",
	} {
		t.Run(name, func(t *testing.T) {
			runThree(t, "")
			node.run(t, "%s", order)
			wantNothingLeft(t, before)
		})
	}
	t.Run("two hundred pods with ten kills", func(t *testing.T) {
		for i := range 10 {
			node.run(t, `for n in $(seq 20); do tripod run --name p%d-$n %s >/dev/null & [ $((n %% 5)) != 0 ] || wait; done; wait
			systemctl kill --signal KILL tripod; %s; tripod rmp --all --force >/dev/null`, i, nginx, answers)
		}
		wantNothingLeft(t, before)
	})
}

// TestLimitsOfUnits: the limits of containers, machines and workers are those of the units that `tripod inspect` names, also
// after systemd has read its files again or changed a neighbour, and after a resize.
func TestLimitsOfUnits(t *testing.T) {
	runThree(t, "")
	client := node.cri(t)
	const memory, bigger = int64(128 << 20), int64(192 << 20)
	var ids []string
	for _, runtime := range []string{"crun", "runc"} {
		resources := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory, CpuQuota: 50_000, CpuPeriod: 100_000, CpuShares: 512,
			CpusetCpus: "0"}
		ids = append(ids, runLimited(t, client, runtime, resources))
	}
	read := func(id string) string {
		return node.run(t, `cgroup=/sys/fs/cgroup$(tripod inspect %s | jq -r .info.info.cgroup)
		cat $cgroup/memory.max $cgroup/cpu.max $cgroup/cpu.weight $cgroup/cpuset.cpus`, id)
	}
	shake := "systemctl daemon-reload; systemctl set-property --runtime tripod.slice CPUWeight=90; systemctl set-property --runtime tripod-vm.slice CPUWeight=90"
	for _, id := range ids {
		for _, order := range []string{"true", shake} {
			node.run(t, "%s", order)
			if got, want := read(id), fmt.Sprintf("%d\n50000 100000\n20\n0\n", memory); got != want {
				t.Errorf("limits of %s after %q: got %q, want %q", id, order, got, want)
			}
		}
		_, err := client.UpdateContainerResources(t.Context(),
			&runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{
				MemoryLimitInBytes: bigger, CpuQuota: 70_000, CpuPeriod: 100_000, CpuShares: 512, CpusetCpus: "0-1"}})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := read(id), fmt.Sprintf("%d\n70000 100000\n20\n0-1\n", bigger); got != want {
			t.Errorf("limits of %s after a resize: got %q, want %q", id, got, want)
		}
		inside := "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max 2>/dev/null || true"
		node.run(t, "tripod exec %s sh -c '%s'", id, inside)
	}
	for _, order := range []string{"true", shake} {
		node.run(t, "%s", order)
		got := node.run(t, "cat /sys/fs/cgroup/tripod.slice/tripod-vm.slice/*/*.service/memory.max")
		if want := fmt.Sprintln(512<<20 + 256<<20); got != want {
			t.Errorf("memory limit of the machine after %q: got %q, want %q", order, got, want)
		}
	}
}

// TestWorkersOfTheirOwn: a component beside a Linux container, and one whose pods have workers of their own, has a unit with
// the container's limits in its pod's slice, and nothing stays of it.
func TestWorkersOfTheirOwn(t *testing.T) {
	t.Cleanup(func() {
		_, _ = node.try(t, "tripod rmp --all --force; mv /root/config.toml /etc/tripod/; systemctl restart tripod")
	})
	node.run(t, `tripod rmp --all --force
	cp /etc/tripod/config.toml /root/ && printf '[wasm]\nworker = "pod"\n' >>/etc/tripod/config.toml && systemctl restart tripod`)
	before := snapshot(t)
	node.run(t, `cat >/root/pods.yaml <<Y
apiVersion: v1
kind: Pod
metadata: {name: mixed}
spec:
  containers:
  - {name: other, image: "%[1]s", command: [sleep, "1000"]}
  - {name: component, image: "%[2]s", resources: {limits: {memory: 128Mi, cpu: 500m}}}
---
apiVersion: v1
kind: Pod
metadata: {name: alone}
spec:
  runtimeClassName: wasm
  containers:
  - {name: component, image: "%[2]s", resources: {limits: {memory: 128Mi, cpu: 500m}}}
Y
	tripod run -f /root/pods.yaml`, busybox, greeter)
	mixed := strings.TrimSpace(node.run(t, "tripod inspectp mixed | jq -r .status.id"))
	for where, least := range map[string]int{"tripod-" + mixed + ".slice/tripod-wasm-*.service": 128 << 20,
		"tripod-wasm.slice/tripod-wasm-*.slice/tripod-wasm-*.service": 128 << 20} {
		out := node.run(t, "cd /sys/fs/cgroup/tripod.slice/%s && systemctl daemon-reload && cat memory.max cpu.max && wc -l <cgroup.procs", where)
		var memory, quota, period, processes int
		if _, err := fmt.Sscan(out, &memory, &quota, &period, &processes); err != nil || memory < least || memory > least+(96<<20) ||
			quota*2 != period || processes == 0 {
			t.Errorf("limits of %s: got %q (%v), want memory from %d on, half a processor, and a process", where, out, err, least)
		}
	}
	node.run(t, "systemctl kill --signal KILL tripod; "+answers+"; tripod rmp --all --force")
	wantNothingLeft(t, before)
}

// TestUnitsAreStopped: the services of helpers and machines are restarted, as needrestart does, or stopped, or their own
// processes are killed. Pods run on, and new ones run.
func TestUnitsAreStopped(t *testing.T) {
	names := runThree(t, "")
	for i, order := range []string{"systemctl restart tripod-helpers.service 'tripod-vm-*.service'",
		"pkill -KILL -x sleep; while systemctl --quiet is-active tripod-helpers.service; do sleep 0.1; done",
		"systemctl stop tripod-helpers.service 'tripod-vm-*.service'", "systemctl isolate multi-user.target"} {
		_, _ = node.try(t, "%s", order) // not every order succeeds
		names = append(names, runThree(t, fmt.Sprintf("-%d", i))...)
		wantReady(t, names...)
	}
}

// TestOOMKilled: a container that the kernel killed for lack of memory says so, although systemd has removed its scope, and its
// neighbour that was killed otherwise does not.
func TestOOMKilled(t *testing.T) {
	t.Cleanup(func() { _, _ = node.try(t, "tripod rmp --all --force") })
	node.run(t, `cat >/root/oom.yaml <<Y
apiVersion: v1
kind: Pod
metadata: {name: oom}
spec:
  restartPolicy: Never
  containers:
  - {name: greedy, image: "%[1]s", command: [sh, -c, "sleep 3; exec tail -c 300m /dev/zero"], resources: {limits: {memory: 20Mi}}}
  - {name: killed, image: "%[1]s", command: [sh, -c, "exec sleep 1000"]}
Y
	tripod run -f /root/oom.yaml`, busybox)
	reason := func(name string) string {
		return strings.TrimSpace(node.run(t, "tripod inspect $(tripod ps --all | awk '/ %s /{print $1}') | jq -r .status.reason", name))
	}
	node.run(t, "timeout 120 sh -c 'until tripod ps --all | grep Exited; do sleep 0.5; done'; kill -KILL $(tripod inspect $(tripod ps | awk '/ killed /{print $1}') | jq .info.info.pid); while tripod ps | grep -q ' killed '; do sleep 0.2; done")
	if greedy, killed := reason("greedy"), reason("killed"); greedy != "OOMKilled" || killed != "Error" {
		t.Errorf("reasons: got %s for the container without memory and %s for the one that was killed, want OOMKilled and Error", greedy, killed)
	}
}

// TestControllersOfSlice: a component that shares a worker has no scope in its pod's slice, and still the slice keeps the
// controllers that a kubelet has enabled there, when a scope with a delegated cgroup ends beside it.
func TestControllersOfSlice(t *testing.T) {
	const slice = "/sys/fs/cgroup/pods.slice/pods-component.slice"
	node.run(t, `busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager StartTransientUnit 'ssa(sv)a(sa(sv))' pods-component.slice replace 4 \
		CPUAccounting b true MemoryAccounting b true IOAccounting b true TasksAccounting b true 0
	until [ -d %s ]; do sleep 0.1; done
	echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control; echo +cpuset >/sys/fs/cgroup/pods.slice/cgroup.subtree_control; tripod pull %s >/dev/null`, slice, greeter)
	t.Cleanup(func() { node.run(t, "systemctl stop pods.slice") })
	before := node.run(t, "cat %s/cgroup.controllers", slice)
	client := node.cri(t)
	pod := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "component", Uid: "component", Namespace: "default"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "pods-component.slice"}}
	made, err := client.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: "wasm"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { node.run(t, "tripod rmp --force %s", made.GetPodSandboxId()) })
	// pacing: systemd takes the controllers away after its answer
	node.run(t, "systemd-run --quiet --scope --slice=pods-other.slice --property=Delegate=yes true; sleep 1")
	if after := node.run(t, "cat %s/cgroup.controllers", slice); after != before || !strings.Contains(before, "cpuset") {
		t.Errorf("controllers of the pod's slice: got %q, want the previous ones, %q, with cpuset", after, before)
	}
}
