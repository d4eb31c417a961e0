package kube

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// addons are the objects that a cluster of several nodes needs: flannel's role, and CoreDNS, which is a pod.
//
//go:embed addons.yaml
var addons string

const coreDNS = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"

func (c *Cluster) applyAddons() error {
	text := strings.NewReplacer("IMAGE", harness.Busybox, "PROGRAMS", c.addons, "ADDRESS", dnsServiceIP, "NODE", NodeName).Replace(addons)
	_, err := c.Kubectl(text, "apply", "-f", "-")
	return err
}

// deleteAddons deletes what runs in pods.
func (c *Cluster) deleteAddons() error {
	_, err := c.Kubectl("", "--namespace", "kube-system", "delete", "deployment", "coredns")
	return err
}

func (c *Cluster) awaitDNS() error {
	return until.Poll(readyTimeout, func() error {
		var d appsv1.Deployment
		err := c.Get(coreDNS, &d)
		if err == nil && d.Status.ReadyReplicas == 0 {
			err = fmt.Errorf("CoreDNS is not ready: %+v", d.Status)
		}
		return err
	})
}

// subnetFile is where flannel writes the node's subnet. A node that boots has none.
const subnetFile = "/run/flannel/subnet.env"

// defineFlannel sets flannel's command line and its configuration. Like a pod of its DaemonSet, it is restarted until the
// node has a subnet.
func (n *Node) defineFlannel() error {
	n.Flannel = n.program("flanneld", "--kubeconfig-file="+n.cluster.identity.kubeconfig("flannel"), "--kube-subnet-mgr", "--ip-masq",
		"--iface="+n.IP,
		"--net-config-path="+n.path("flannel.json"), "--subnet-file="+subnetFile)
	n.Flannel.argv[0] = filepath.Join(n.cluster.addons, "flanneld")
	n.Flannel.env = []string{"NODE_NAME=" + n.Name}
	n.Flannel.supervised = true
	config := fmt.Sprintf(`{"Network": %q, "Backend": {"Type": "host-gw"}}`, PodCIDR)
	return os.WriteFile(n.path("flannel.json"), []byte(config), 0o644)
}

// writeNetwork writes the node's CNI configuration once flannel knows its subnet. It is what flannel's own CNI plugin,
// which the module proxy does not serve, delegates to.
func (n *Node) writeNetwork() error {
	subnet := map[string]string{}
	err := n.do(func() error {
		data, err := os.ReadFile(subnetFile)
		for line := range strings.Lines(string(data)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			subnet[key] = value
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, n.Flannel.Tail(5))
	}
	mtu, err1 := strconv.Atoi(subnet["FLANNEL_MTU"])
	masquerades, err2 := strconv.ParseBool(subnet["FLANNEL_IPMASQ"])
	gateway, err3 := netip.ParsePrefix(subnet["FLANNEL_SUBNET"]) // the first address of the subnet
	text, err4 := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "cbr0",
		"plugins": []any{
			map[string]any{
				"type": "bridge", "mtu": mtu, "ipMasq": !masquerades, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
				"ipam": map[string]any{
					"type":   "host-local",
					"ranges": [][]any{{map[string]string{"subnet": gateway.Masked().String()}}},
					"routes": []any{map[string]string{"dst": subnet["FLANNEL_NETWORK"]}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	})
	if err := errors.Join(err1, err2, err3, err4, os.MkdirAll(n.path("net.d"), 0o755)); err != nil {
		return err
	}
	return os.WriteFile(n.path("net.d/10-flannel.conflist"), text, 0o644)
}
