package network

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func TestFindChain(t *testing.T) {
	list := func(name string) string {
		return `{"cniVersion":"1.0.0","name":"` + name + `","plugins":[{"type":"bridge"}]}`
	}
	for name, c := range map[string]struct {
		files map[string]string
		want  string // network name; "" means an error
	}{
		"no files":             {nil, defaultNetworkName},
		"other files":          {map[string]string{"README": "x", "10.conflist.bak": "x"}, defaultNetworkName},
		"first by name":        {map[string]string{"20-b.conflist": list("b"), "10-a.conflist": list("a")}, "a"},
		"single plugin":        {map[string]string{"10.conf": `{"cniVersion":"0.3.1","name":"single","type":"bridge"}`}, "single"},
		"json":                 {map[string]string{"10.json": `{"cniVersion":"0.3.1","name":"single","type":"bridge"}`}, "single"},
		"list in a conf":       {map[string]string{"10.conf": list("a")}, "a"},
		"no version":           {map[string]string{"10.conf": `{"name":"old","type":"bridge"}`}, "old"},
		"several versions":     {map[string]string{"10.conflist": `{"cniVersions":["0.4.0","1.1.0","9.0.0"],"name":"n","plugins":[{"type":"bridge"}]}`}, "n"},
		"first is broken":      {map[string]string{"10.conflist": `{"cniVersion":`, "20.conflist": list("b")}, ""},
		"empty":                {map[string]string{"10.conflist": ""}, ""},
		"no plugins":           {map[string]string{"10.conflist": `{"cniVersion":"1.0.0","name":"a","plugins":[]}`}, ""},
		"no name":              {map[string]string{"10.conflist": `{"cniVersion":"1.0.0","plugins":[{"type":"bridge"}]}`}, ""},
		"bad name":             {map[string]string{"10.conflist": list("../../etc")}, ""},
		"plugin without type":  {map[string]string{"10.conflist": `{"cniVersion":"1.0.0","name":"a","plugins":[{}]}`}, ""},
		"version of tomorrow":  {map[string]string{"10.conflist": `{"cniVersion":"9.0.0","name":"a","plugins":[{"type":"bridge"}]}`}, ""},
		"version is no number": {map[string]string{"10.conflist": `{"cniVersion":"new","name":"a","plugins":[{"type":"bridge"}]}`}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := findChain(dir, DefaultNetwork{Bridge: "b0", SubnetV4: DefaultSubnetV4}, "/leases", nil)
			switch {
			case c.want == "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), dir)):
				t.Errorf("findChain = %v, %v, want a failed precondition that names the file", got, err)
			case c.want != "" && (err != nil || got.list.Name != c.want):
				t.Errorf("findChain = %v, %v, want network %s", got, err, c.want)
			}
		})
	}
}

// TestFindChainAgain checks that the embedded default is made again only if its settings differ, and never instead of a file.
func TestFindChainAgain(t *testing.T) {
	dir, def := t.TempDir(), DefaultNetwork{Bridge: "b0", SubnetV4: DefaultSubnetV4, MTU: 1500}
	find := func(def DefaultNetwork, last *chain) *chain {
		t.Helper()
		c, err := findChain(dir, def, "/leases", last)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := find(def, nil)
	if find(def, first) != first {
		t.Error("the same default was made again")
	}
	def.MTU = 1400
	if c := find(def, first); c == first || !strings.Contains(string(c.list.Bytes), "1400") {
		t.Errorf("with another MTU: got %s", c.list.Bytes)
	}
	if err := os.WriteFile(filepath.Join(dir, "10.conflist"), []byte(`{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"first"}]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	file := find(def, first)
	if file.embedded() || find(def, file) == file { // a file may have changed
		t.Errorf("with a file: got the chain of %s", file.source)
	}
	if err := os.Remove(filepath.Join(dir, "10.conflist")); err != nil {
		t.Fatal(err)
	}
	if c := find(def, file); !c.embedded() {
		t.Errorf("after the file's removal: got the chain of %s", c.source)
	}
}

// TestPluginsInFolder checks that a chain includes the plugins in the folder beside a list (since CNI 1.1.0), because
// records need them.
func TestPluginsInFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "net"), 0o755); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{
		"10.conflist": `{"cniVersion":"1.1.0","name":"net","disableCheck":true,"plugins":[{"type":"first"}]}`,
		"net/20.conf": `{"type":"second"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c, err := findChain(dir, DefaultNetwork{}, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"name":"net","cniVersion":"1.1.0","disableCheck":true,"plugins":[{"type":"first"},{"type":"second"}]}`
	if string(c.list.Bytes) != want || len(c.list.Plugins) != 2 {
		t.Errorf("findChain read the list %s, want %s", c.list.Bytes, want)
	}
}

func TestDefaultChainHasWhatThePodNeeds(t *testing.T) {
	c, err := defaultChain(DefaultNetwork{Bridge: "b0", SubnetV4: "10.1.2.3/16", SubnetV6: "fd00::/64"}, "/leases")
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		pod  Attachment
		want string
	}{
		"nothing":   {Attachment{ID: "p"}, "bridge"},
		"ports":     {Attachment{ID: "p", PortMappings: []PortMapping{{HostPort: 1, ContainerPort: 1}}}, "bridge portmap"},
		"bandwidth": {Attachment{ID: "p", Bandwidth: &Bandwidth{Ingress: 1}}, "bridge bandwidth"},
		"all": {Attachment{ID: "p", Bandwidth: &Bandwidth{Egress: 1}, PortMappings: []PortMapping{{HostPort: 1, ContainerPort: 1}}},
			"bridge portmap bandwidth"},
	} {
		rec, err := newRecord(test.pod, c)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, plugin := range rec.list.Plugins {
			got = append(got, plugin.Network.Type)
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: the chain's plugins are %v, want %s", name, got, test.want)
		}
	}
	for _, want := range []string{`"subnet":"10.1.0.0/16"`, `"dst":"::/0"`, `"dataDir":"/leases"`, `"isGateway":true`, `"hairpinMode":true`} {
		if !strings.Contains(string(c.list.Bytes), want) {
			t.Errorf("the chain %s does not contain %s", c.list.Bytes, want)
		}
	}
}

// TestPluginsAreToldOfThePod checks the arguments that a plugin gets for an Attachment.
func TestPluginsAreToldOfThePod(t *testing.T) {
	n := newNode(t, nil)
	seen := filepath.Join(t.TempDir(), "seen")
	n.plugin("spy", `
cat > `+seen+`-$CNI_COMMAND.json
env | grep ^CNI_ > `+seen+`-$CNI_COMMAND.env
echo '{"cniVersion":"1.0.0"}'`)
	n.configure("10.conflist", `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"spy","capabilities":{
		"portMappings":true,"bandwidth":true,"dns":true,"cgroupPath":true,"io.kubernetes.cri.pod-annotations":true}}]}`)
	pod := Attachment{
		ID: "a.b:C@1.0.0#0", Name: "web", Namespace: "prod", UID: "u-1",
		PortMappings: []PortMapping{{HostPort: 80, ContainerPort: 8080, HostIP: "192.0.2.1"}, {ContainerPort: 9}},
		Bandwidth:    &Bandwidth{Ingress: 1_000_000},
		DNS:          DNS{Servers: []string{"192.0.2.53"}, Searches: []string{"example.com"}, Options: []string{"ndots:5"}},
		CgroupParent: "/kubepods/pod1",
		Annotations:  map[string]string{"k8s.v1.cni.cncf.io/networks": "net-a"},
	}
	r := n.setup(pod)
	if len(r.IPs) != 0 {
		t.Errorf("IPs = %v, want none from a chain that assigns none", r.IPs)
	}
	n.restart()
	n.teardown(pod)
	n.assertClean()
	const wantConfig = `{"bandwidth":{"ingressRate":1000000,"ingressBurst":2147483647},"cgroupPath":"/kubepods/pod1",` +
		`"dns":{"servers":["192.0.2.53"],"searches":["example.com"],"options":["ndots:5"]},` +
		`"io.kubernetes.cri.pod-annotations":{"k8s.v1.cni.cncf.io/networks":"net-a"},` +
		`"portMappings":[{"hostPort":80,"containerPort":8080,"protocol":"tcp","hostIP":"192.0.2.1"}]}`
	for _, command := range []string{"ADD", "DEL"} {
		data, err := os.ReadFile(seen + "-" + command + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var config struct {
			RuntimeConfig json.RawMessage `json:"runtimeConfig"`
		}
		if err := json.Unmarshal(data, &config); err != nil || string(config.RuntimeConfig) != wantConfig {
			t.Errorf("%s: runtimeConfig = %s, %v, want %s", command, config.RuntimeConfig, err, wantConfig)
		}
		env, err := os.ReadFile(seen + "-" + command + ".env")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"CNI_CONTAINERID=" + keyOf(pod.ID), "CNI_IFNAME=eth0", "CNI_NETNS=" + n.Netns(pod.ID),
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=" + pod.ID + ";K8S_POD_UID=u-1",
		} {
			if !strings.Contains(string(env), want+"\n") {
				t.Errorf("%s: the environment does not contain %s:\n%s", command, want, env)
			}
		}
	}
}

func TestBandwidthPlugin(t *testing.T) {
	n := newNode(t, nil)
	pod := Attachment{ID: "pod", Bandwidth: &Bandwidth{Ingress: 100_000_000, Egress: 50_000_000}}
	r := n.setup(pod)
	n.serve(r.Netns, "0.0.0.0:80", "hello")
	n.mustAsk("", r.IPs[0].String()+":80", "hello")
	n.teardown(pod)
	n.assertClean()
}

// TestResultOfManyInterfaces checks which addresses Setup takes from results with interfaces in the pod and on the
// host, in several CNI versions.
func TestResultOfManyInterfaces(t *testing.T) {
	for name, c := range map[string]struct{ result, wantIPs string }{
		"two in the pod": {`{"cniVersion":"1.0.0","interfaces":[{"name":"br0"},{"name":"net1","sandbox":"/x"},{"name":"eth0","sandbox":"/x"}],
			"ips":[{"interface":1,"address":"10.2.0.2/24"},{"interface":2,"address":"fd00::2/64"},{"interface":2,"address":"10.1.0.2/24"}]}`,
			"[fd00::2 10.1.0.2]"},
		"another name":        {`{"cniVersion":"1.0.0","interfaces":[{"name":"net1","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.2.0.2/24"}]}`, "[10.2.0.2]"},
		"address of no link":  {`{"cniVersion":"1.0.0","interfaces":[{"name":"br0"},{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.2.0.2/24"}]}`, "[10.2.0.2]"},
		"host side only":      {`{"cniVersion":"1.0.0","interfaces":[{"name":"br0"}],"ips":[{"interface":0,"address":"10.2.0.1/24"}]}`, "[]"},
		"0.4.0":               {`{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"version":"4","interface":0,"address":"10.2.0.2/24"}]}`, "[10.2.0.2]"},
		"0.2.0":               {`{"cniVersion":"0.2.0","ip4":{"ip":"10.2.0.2/24"},"ip6":{"ip":"fd00::2/64"}}`, "[10.2.0.2 fd00::2]"},
		"mapped":              {`{"cniVersion":"1.0.0","ips":[{"address":"::ffff:10.2.0.2/120"}]}`, "[10.2.0.2]"},
		"nothing but version": {`{"cniVersion":"1.0.0"}`, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			n.plugin("fixed", "cat <<END\n"+c.result+"\nEND\n")
			version := struct{ CNIVersion string }{}
			if err := json.Unmarshal([]byte(c.result), &version); err != nil {
				t.Fatal(err)
			}
			n.configure("10.conflist", `{"cniVersion":"`+version.CNIVersion+`","name":"n","plugins":[{"type":"fixed"}]}`)
			r := n.setup(Attachment{ID: "pod"})
			if got := fmt.Sprint(r.IPs); got != c.wantIPs {
				t.Errorf("IPs = %s, want %s; interfaces %+v", got, c.wantIPs, r.Interfaces)
			}
			n.teardown(Attachment{ID: "pod"})
			n.assertClean()
		})
	}
}

func TestStatus(t *testing.T) {
	n := newNode(t, nil)
	becomes := func(what, want string) {
		t.Helper()
		var last error
		defer func() {
			if t.Failed() {
				t.Logf("last status: %v", last)
			}
		}()
		eventually(t, 5*time.Second, what, func() bool {
			last = n.Status(t.Context())
			return (last == nil) == (want == "") && (last == nil || strings.Contains(last.Error(), want))
		})
	}
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(n.cfg.ConfDir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	becomes("the default ready", "")
	write("10.conflist", `{"cniVersion":"1.0.0"`)
	becomes("a broken file", "10.conflist")
	if _, err := n.Setup(t.Context(), Attachment{ID: "pod"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Setup with a broken configuration: %v", err)
	}
	write("10.conflist", `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","ipam":{"type":"missing-ipam"}}]}`)
	becomes("a missing plugin", `"missing-ipam"`)
	write("10.conflist", `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"bridge"}]}`)
	becomes("Debian's plugin with 1.1.0", "does not speak version 1.1.0")

	broken := filepath.Join(t.TempDir(), "broken")
	n.plugin("agent", `
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}';;
STATUS) [ -e `+broken+` ] && { echo '{"cniVersion":"1.1.0","code":50,"msg":"the agent is away"}'; exit 1; };;
esac
exit 0`)
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write("10.conflist", `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"agent"}]}`)
	becomes("STATUS failing", "the agent is away")
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	write("10.conflist", `{"cniVersion":"1.1.0","name":"n2","plugins":[{"type":"agent"}]}`)
	becomes("STATUS well", "")
	write("10.conflist", `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"nothing-like-it"}]}`)
	becomes("another missing plugin", "nothing-like-it")
	if err := os.Remove(filepath.Join(n.cfg.ConfDir, "10.conflist")); err != nil {
		t.Fatal(err)
	}
	becomes("the default again", "")
}

// TestStatusSeesDirectoryAppear checks that a configuration directory made later is noticed: network add-ons make it
// when they are installed.
func TestStatusSeesDirectoryAppear(t *testing.T) {
	n := newNode(t, func(c *Config) { c.ConfDir = filepath.Join(c.ConfDir, "not", "yet") })
	if err := n.Status(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(n.cfg.ConfDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.cfg.ConfDir, "10.conflist"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "an error for the broken file", func() bool { return n.Status(t.Context()) != nil })
}

func TestGCVerb(t *testing.T) {
	n := newNode(t, nil)
	seen := filepath.Join(t.TempDir(), "gc")
	n.plugin("agent", `
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}';;
ADD) echo '{"cniVersion":"1.1.0"}';;
GC) cat > `+seen+`;;
esac
exit 0`)
	n.configure("10.conflist", `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"agent"}]}`)
	n.setup(Attachment{ID: "kept"})
	n.setup(Attachment{ID: "gone"})
	n.restart()
	n.setup(Attachment{ID: "new"})
	if err := n.GC(t.Context(), []string{"kept"}); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	var input struct {
		Valid []struct{ ContainerID, IfName string } `json:"cni.dev/valid-attachments"`
	}
	if err := json.Unmarshal(data, &input); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(input.Valid), "[{kept eth0} {new eth0}]"; got != want {
		t.Errorf("valid attachments passed to GC = %s, want %s", got, want)
	}
	n.gcMu.RLock() // as during an ADD
	defer n.gcMu.RUnlock()
	_ = os.Remove(seen)
	if err := n.GC(t.Context(), []string{"kept"}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(seen); err == nil {
		t.Error("the GC verb ran during an ADD")
	}
}

// TestGCVerbGivesWay checks that no pod waits for a plugin that hangs in GC.
func TestGCVerbGivesWay(t *testing.T) {
	n := newNode(t, nil)
	begun := filepath.Join(t.TempDir(), "gc")
	n.plugin("agent", `
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}';;
ADD) echo '{"cniVersion":"1.1.0"}';;
GC) touch `+begun+`; sleep 3600;;
esac
exit 0`)
	n.configure("10.conflist", `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"agent"}]}`)
	collected := make(chan error, 1)
	go func() { collected <- n.GC(t.Context(), nil) }()
	eventually(t, 10*time.Second, "the start of GC", func() bool { _, err := os.Stat(begun); return err == nil })
	n.setup(Attachment{ID: "new"})
	if err := <-collected; err == nil || !strings.Contains(err.Error(), "gave way") {
		t.Errorf("GC = %v, want an error that it gave way to the pod", err)
	}
}
