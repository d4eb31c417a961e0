package kube

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/pelletier/go-toml/v2"

	"github.com/tripod-run/tripod/test/harness"
)

// program returns a program of the cluster that runs on the node.
func (n *Node) program(name string, args ...string) *Process {
	p := &Process{
		Name: name, LogPath: n.path(name + ".log"), argv: append([]string{filepath.Join(n.cluster.programs, name)}, args...),
		start: func(cmd *exec.Cmd) error { return n.do(cmd.Start) },
	}
	if harness.Installed() {
		p.start = startUnit
	}
	return p
}

// config returns the argument that makes a program the given client of the API server.
func (c *Cluster) config(client string) string {
	return "--kubeconfig=" + c.identity.kubeconfig(client)
}

// hostNetworkUsers allows pods with a user namespace on the node's network.
const hostNetworkUsers = "--feature-gates=UserNamespacesHostNetworkSupport=true"

// defineControlPlane sets the command lines of the programs on the first node that control the cluster.
func (c *Cluster) defineControlPlane() {
	program, config := c.program, c.config
	c.Etcd = program("etcd", "--data-dir="+c.path("etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL, "--listen-peer-urls=http://127.0.0.1:2380")
	c.Etcd.argv[0] = "etcd"
	c.APIServer = program("kube-apiserver",
		"--etcd-servers="+etcdURL, "--advertise-address="+NodeIP, "--service-cluster-ip-range="+ServiceCIDR,
		"--cert-dir="+c.path("pki"), "--tls-cert-file="+c.identity.path("apiserver.crt"),
		"--tls-private-key-file="+c.identity.path("apiserver.key"),
		"--token-auth-file="+c.identity.path("tokens.csv"), "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.identity.path("accounts.key"),
		"--service-account-signing-key-file="+c.identity.path("accounts.key"),
		"--kubelet-preferred-address-types=InternalIP", "--allow-privileged=true", hostNetworkUsers,
		"--requestheader-client-ca-file="+c.identity.path("ca.crt"), "--requestheader-allowed-names="+frontProxy,
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+c.identity.path(frontProxy+".crt"), "--proxy-client-key-file="+c.identity.path(frontProxy+".key"))
	c.ControllerManager = program("kube-controller-manager", config("system:kube-controller-manager"), "--leader-elect=false",
		"--use-service-account-credentials=true", "--allocate-node-cidrs=true", "--cluster-cidr="+PodCIDR,
		"--service-cluster-ip-range="+ServiceCIDR,
		"--root-ca-file="+c.identity.path("ca.crt"), "--service-account-private-key-file="+c.identity.path("accounts.key"),
		"--cert-dir="+c.path("pki"), "--kube-api-qps=500", "--kube-api-burst=500")
	if c.flannel() {
		// Notice within seconds that a node is away. The only node of a cluster may be busy.
		c.ControllerManager.argv = append(c.ControllerManager.argv, "--node-monitor-grace-period=20s", "--node-monitor-period=2s")
	}
	c.Scheduler = program("kube-scheduler", config("system:kube-scheduler"), "--leader-elect=false", "--cert-dir="+c.path("pki"),
		"--kube-api-qps=500", "--kube-api-burst=500", hostNetworkUsers)
}

// defineProcesses sets the command line of each program of the node and the kubelet's configuration.
func (n *Node) defineProcesses(tripod string) {
	config := n.cluster.config
	n.Daemon = n.program("tripod", "daemon", "--config", n.path("tripod.toml"))
	n.Daemon.argv[0] = tripod
	if harness.Installed() {
		n.followService()
	}
	n.Kubelet = n.program("kubelet", config("system:node:"+n.Name), "--config="+n.path("kubelet.json"),
		"--node-ip="+n.IP, "--hostname-override="+n.Name, "--root-dir="+n.path("kubelet"), "--cert-dir="+n.path("kubelet-pki"), "--v=2")
	n.Kubelet.supervised = true
	n.Proxy = n.program("kube-proxy", config("system:kube-proxy"), "--hostname-override="+n.Name, "--proxy-mode=iptables",
		"--cluster-cidr="+PodCIDR,
		// The limits of connection tracking apply to the whole host, so leave them unchanged.
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")

	n.kubelet = map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": "unix:///run/tripod/tripod.sock",
		"staticPodPath":            n.path("manifests"),
		"resolvConf":               n.path("resolv.conf"),
		"clusterDNS":               []string{dnsServiceIP}, // not in use on the only node, but without an address, each pod gets a warning
		"clusterDomain":            "cluster.local",
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               n.kubeCgroup(),
		"cgroupsPerQOS":            true,
		"enforceNodeAllocatable":   []string{},
		"failCgroupV1":             false,
		"failSwapOn":               false,
		"makeIPTablesUtilChains":   false, // kube-proxy creates its own chains
		"protectKernelDefaults":    true,  // see overlaySysctls
		"authentication":           map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":            map[string]any{"mode": "AlwaysAllow"},
		// Disable eviction and image garbage collection unless a test enables them.
		"evictionHard": map[string]string{"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%",
			"nodefs.inodesFree": "0%"},
		"imageGCHighThresholdPercent": 100,
		// Notice changes to ConfigMaps, Secrets and static pods within seconds, not minutes.
		"syncFrequency": "10s", "fileCheckFrequency": "1s",
		// The kubelet passes the pod CIDR to the runtime after its second status report.
		"nodeStatusUpdateFrequency": "2s",
		"serializeImagePulls":       false,
		"featureGates": map[string]bool{
			"PodAndContainerStatsFromCRI":      true, // the kubelet takes every figure of pods from the runtime, as docs/kubernetes.md recommends
			"UserNamespacesHostNetworkSupport": true, // see hostNetworkUsers
		},
	}
	if harness.Installed() {
		// The host has systemd and cgroup v2, and is the kubelet's alone.
		for _, key := range []string{"cgroupDriver", "cgroupRoot", "enforceNodeAllocatable", "failCgroupV1", "failSwapOn",
			"nodeStatusUpdateFrequency", "protectKernelDefaults"} {
			delete(n.kubelet, key)
		}
	}
}

// writeKubeletConfig writes the kubelet's configuration. Each change replaces top-level keys.
func (n *Node) writeKubeletConfig(change ...map[string]any) error {
	config := maps.Clone(n.kubelet)
	for _, ch := range change {
		maps.Copy(config, ch)
	}
	data, err := json.MarshalIndent(config, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(n.path("manifests"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(n.path("resolv.conf"), []byte("nameserver "+n.IP+"\n"), 0o644); err != nil {
		return err
	}
	return os.WriteFile(n.path("kubelet.json"), data, 0o600)
}

// MetricsAddress is the address of the metrics of a node's daemon, on the node's loopback interface.
const MetricsAddress = "127.0.0.1:9464"

// writeDaemonConfig writes Tripod's configuration, for all kinds of pods, with small emulated machines. Each change replaces
// keys of a section.
func (n *Node) writeDaemonConfig(change ...map[string]map[string]any) error {
	hosts, err := n.cluster.registryHosts()
	if err != nil {
		return err
	}
	config := map[string]map[string]any{
		"log": {"level": "debug"},
		// These are the default aliases, and the handler name that Kubernetes' own RuntimeClass tests use.
		"node":  {"handler_aliases": map[string]string{"runc": "linux", "crun": "linux", "test-handler": "linux"}},
		"image": {"hosts_dirs": []string{hosts}},
		"network": {
			"conf_dir": n.path("net.d"), "bin_dirs": []string{"/usr/lib/cni"},
			"default": map[string]any{"enabled": !n.cluster.flannel()},
		},
		"linux":   {"cgroup_parent": n.cgroup() + "/pods"},
		"vm":      {"accel": "tcg", "default_memory": 128 << 20, "guest_dir": filepath.Join(harness.Root(), "build", "guest")},
		"metrics": {"address": MetricsAddress},
	}
	if handler := harness.DefaultHandler(); handler != "" {
		config["node"]["default_handler"] = handler
	}
	all := map[string]any{"root": n.path("tripod")}
	for section, keys := range config {
		for _, ch := range change {
			maps.Copy(keys, ch[section])
		}
		all[section] = keys
	}
	text, err := toml.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(n.path("tripod.toml"), text, 0o600)
}
