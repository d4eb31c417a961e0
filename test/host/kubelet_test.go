package host

import (
	"context"
	"strings"
	"testing"
	"time"
)

// cluster runs the tests of test/kubelet for an installed host, in the guest. The kubelet and the control plane are units
// in kubernetes.slice. Without KVM, the machine that is resized does not boot in time with its half of an emulated processor;
// TestLimitsOfUnits checks the limits of machines, too.
const cluster = `modprobe br_netfilter && mkdir -p /var/tmp/cluster && cd /payload/test/kubelet && env TRIPOD_TEST_INSTALLED=1 \
	TRIPOD_TEST_DIR=/var/tmp/cluster TRIPOD_TEST_SLOWNESS=8 TRIPOD_KUBE_CACHE=/payload/kube TRIPOD_BIN=/usr/bin/tripod \
	/payload/kubelet.test -test.v -test.parallel 3 -test.timeout 1h -test.run '^TestInstalled$' \
	$(grep -q ^kvm_ /proc/modules || echo '-test.skip ^TestInstalled$/^pods$/^resize$/^vm$')`

// endCluster removes what a cluster leaves by design, and everything of one that did not come to its end.
const endCluster = `systemctl kill --signal KILL kubernetes.slice; tripod rmp --all --force; systemctl stop kubepods.slice; ip link delete node0
	grep -o ' /var/tmp/cluster/[^ ]*' /proc/self/mountinfo | xargs --no-run-if-empty umount; rm -rf /var/tmp/cluster
	for t in iptables ip6tables; do $t-save | grep -vE 'KUBE-|10\.244\.0\.0/24|TRIPOD-(MASQ|FORWARD)-c0e7eac979dd' | $t-restore; done` // the rules of the pod CIDR stay like its bridge

// TestKubelet: a kubelet with its default configuration, which takes the cgroup driver from the runtime, runs pods of each
// kind on the service, and nothing of them is left.
func TestKubelet(t *testing.T) {
	if out, err := node.try(t, "ls /payload/kubelet.test"); err != nil {
		t.Skipf("hack/kube.sh build makes the programs of Kubernetes: %s", out)
	}
	// A machine that is emulated inside an emulated host can need longer than the default until its guest runs.
	node.run(t, `cp /etc/tripod/config.toml /root/ && printf '[vm]\nboot_timeout = "20m"\n' >>/etc/tripod/config.toml && systemctl restart tripod`)
	t.Cleanup(func() { node.run(t, "mv /root/config.toml /etc/tripod/ && systemctl restart tripod") })
	runThree(t, "-first") // what belongs to the node, such as the bridge, comes with the first pods
	node.run(t, "tripod rmp --all --force")
	before, since := snapshot(t), strings.TrimSpace(node.run(t, "date +%%s"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	out, err := node.command(ctx, cluster, nil)
	keep(t, "kubelet.txt", out)
	if err != nil {
		t.Errorf("%v", tail(out, 200))
	}
	if units := node.run(t,
		"systemctl list-units --all --plain --no-legend '*kubepods-*pod*' 'tripod-*.scope' 'tripod-vm-*.service' 'tripod-wasm-*.service'"); units != "" {
		t.Errorf("units after the cluster's end:\n%s", units)
	}
	if log := node.run(t, "journalctl --no-pager --quiet --since @%s --priority warning _PID=1 | grep -E 'tripod|kubepods' || true",
		since); log != "" {
		t.Errorf("systemd warns:\n%s", log)
	}
	node.run(t, "%s", endCluster)
	wantNothingLeft(t, before)
}
