package builtin

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/netthread"
)

// plugins is the directory of the reference's executables.
const plugins = "/usr/lib/cni"

const (
	plainIPAM   = `{"type":"host-local","dataDir":"/x","ranges":[[{"subnet":"10.1.0.0/16"}]],"routes":[{"dst":"0.0.0.0/0"}]}`
	plainBridge = `{"cniVersion":"1.0.0","name":"n","type":"bridge","bridge":"b0","isGateway":true,"hairpinMode":true,"ipam":` + plainIPAM +
		`}`
)

// with replaces a part of a configuration.
func with(conf, old, new string) string {
	if !strings.Contains(conf, old) {
		panic(conf + " has no " + old)
	}
	return strings.Replace(conf, old, new, 1)
}

// bridgeWith returns plainBridge with another field.
func bridgeWith(field string) string {
	return with(plainBridge, `"isGateway":true`, `"isGateway":true,`+field)
}

func environment(changes ...string) []string {
	return append([]string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_NETNS=/run/netns/x", "CNI_PATH=/nowhere:" + plugins,
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=i;K8S_POD_UID=u"}, changes...)
}

// TestPlan checks which executions Plan accepts: why is empty if it accepts the case, and otherwise a part of the
// reason.
func TestPlan(t *testing.T) {
	const (
		loopback = `{"cniVersion":"1.0.0","name":"n","type":"loopback"}`
		portmap  = `{"cniVersion":"1.0.0","name":"n","type":"portmap","snat":true,"capabilities":{"portMappings":true},"prevResult":{"cniVersion":"1.0.0"}}`
	)
	for name, c := range map[string]struct {
		plugin, conf string
		env          []string
		why          string
	}{
		"bridge":                {"bridge", plainBridge, nil, ""},
		"DEL":                   {"bridge", plainBridge, environment("CNI_COMMAND=DEL"), ""},
		"DEL without namespace": {"bridge", plainBridge, environment("CNI_COMMAND=DEL", "CNI_NETNS="), ""},
		"DEL with a result":     {"bridge", bridgeWith(`"prevResult":{"cniVersion":"1.0.0","ips":[]}`), environment("CNI_COMMAND=DEL"), ""},
		"no arguments":          {"bridge", plainBridge, environment("CNI_ARGS="), ""},
		"values that ask nothing": {"bridge", bridgeWith(`"ipMasq":false,"vlan":0,"runtimeConfig":{},"dns":{"nameservers":["192.0.2.1"]}`), nil,
			""},
		"all of ours": {"bridge", bridgeWith(`"isDefaultGateway":true,"forceAddress":true,"mtu":1400,"ipMasq":true`), nil, ""},
		"0.3.1":       {"bridge", with(plainBridge, "1.0.0", "0.3.1"), nil, ""},
		"old range": {"bridge",
			with(plainBridge, plainIPAM,
				`{"type":"host-local","subnet":"10.1.0.0/16","rangeStart":"10.1.0.9","rangeEnd":"10.1.0.99","gateway":"10.1.0.1"}`), nil, ""},
		"loopback":                  {"loopback", loopback, nil, ""},
		"loopback in a chain":       {"loopback", with(loopback, `"name"`, `"prevResult":{"cniVersion":"1.0.0"},"name"`), nil, ""},
		"portmap without ports":     {"portmap", portmap, nil, ""},
		"portmap DEL without ports": {"portmap", portmap, environment("CNI_COMMAND=DEL"), ""},

		"CHECK":                 {"bridge", plainBridge, environment("CNI_COMMAND=CHECK"), "CHECK"},
		"VERSION":               {"bridge", `{"cniVersion":"1.0.0"}`, environment("CNI_COMMAND=VERSION"), "VERSION"},
		"GC":                    {"bridge", plainBridge, environment("CNI_COMMAND=GC"), "GC"},
		"STATUS":                {"bridge", plainBridge, environment("CNI_COMMAND=STATUS"), "STATUS"},
		"ADD without namespace": {"bridge", plainBridge, environment("CNI_NETNS="), "incomplete"},
		"no container":          {"bridge", plainBridge, environment("CNI_CONTAINERID="), "incomplete"},
		"MAC by argument":       {"bridge", plainBridge, environment("CNI_ARGS=IgnoreUnknown=1;MAC=02:00:00:00:00:01"), "MAC"},
		"IP by argument":        {"bridge", plainBridge, environment("CNI_ARGS=IgnoreUnknown=1;IP=10.1.0.9"), "IP"},
		"strict arguments":      {"bridge", plainBridge, environment("CNI_ARGS=K8S_POD_NAME=p"), "IgnoreUnknown"},
		"junk arguments":        {"bridge", plainBridge, environment("CNI_ARGS=IgnoreUnknown=1;;"), "argument"},
		"1.1.0":                 {"bridge", with(plainBridge, "1.0.0", "1.1.0"), nil, "1.1.0"},
		"0.2.0":                 {"bridge", with(plainBridge, "1.0.0", "0.2.0"), nil, "0.2.0"},
		"no name":               {"bridge", with(plainBridge, `"name":"n"`, `"name":""`), nil, "name"},
		"ipMasqBackend":         {"bridge", bridgeWith(`"ipMasq":true,"ipMasqBackend":"nftables"`), nil, "ipMasqBackend"},
		"vlan":                  {"bridge", bridgeWith(`"vlan":7`), nil, "vlan"},
		"vlan in capitals":      {"bridge", bridgeWith(`"VLAN":7`), nil, "vlan"},
		"vlanTrunk":             {"bridge", bridgeWith(`"vlanTrunk":[]`), nil, "vlanTrunk"},
		"macspoofchk":           {"bridge", bridgeWith(`"macspoofchk":true`), nil, "macspoofchk"},
		"enabledad":             {"bridge", bridgeWith(`"enabledad":true`), nil, "enabledad"},
		"portIsolation":         {"bridge", bridgeWith(`"portIsolation":true`), nil, "portIsolation"},
		"args":                  {"bridge", bridgeWith(`"args":{"cni":{"mac":"02:00:00:00:00:01"}}`), nil, "args"},
		"runtimeConfig":         {"bridge", bridgeWith(`"runtimeConfig":{"mac":"02:00:00:00:00:01"}`), nil, "mac"},
		"hairpin and promisc":   {"bridge", bridgeWith(`"promiscMode":true`), nil, "promiscMode"},
		"negative mtu":          {"bridge", bridgeWith(`"mtu":-1`), nil, "mtu"},
		"mtu as text":           {"bridge", bridgeWith(`"mtu":"1400"`), nil, "mtu"},
		"field of tomorrow":     {"bridge", bridgeWith(`"tomorrow":1`), nil, "tomorrow"},
		"no ipam":               {"bridge", with(plainBridge, `,"ipam":`+plainIPAM, ""), nil, "ipam"},
		"empty ipam":            {"bridge", with(plainBridge, plainIPAM, `{}`), nil, "ipam"},
		"other ipam":            {"bridge", with(plainBridge, plainIPAM, `{"type":"static"}`), nil, "static"},
		"resolvConf":            {"bridge", with(plainBridge, `"dataDir"`, `"resolvConf":"/etc/resolv.conf","dataDir"`), nil, "resolvConf"},
		"route with mtu":        {"bridge", with(plainBridge, `"dst":"0.0.0.0/0"`, `"dst":"0.0.0.0/0","mtu":1400`), nil, "mtu"},
		"range of tomorrow":     {"bridge", with(plainBridge, `"subnet"`, `"tomorrow":1,"subnet"`), nil, "tomorrow"},
		"no host-local":         {"bridge", plainBridge, environment("CNI_PATH=/nowhere"), "host-local"},
		"twice":                 {"bridge", plainBridge + "{}", nil, "trailing data"},
		"no JSON":               {"bridge", "bridge", nil, "invalid"},
		"nothing":               {"bridge", "", nil, "EOF"},
		"loopback with more":    {"loopback", with(loopback, `"name"`, `"more":1,"name"`), nil, "more"},
		"portmap with ports": {"portmap",
			with(portmap, `"snat"`, `"runtimeConfig":{"portMappings":[{"hostPort":80,"containerPort":80,"protocol":"tcp"}]},"snat"`), nil,
			"host ports"},
		"portmap with backend": {"portmap", with(portmap, `"snat"`, `"backend":"nftables","snat"`), nil, "backend"},
		"portmap alone":        {"portmap", with(portmap, `,"prevResult":{"cniVersion":"1.0.0"}`, ""), nil, "prevResult"},
		"other plugin":         {"firewall", `{"cniVersion":"1.0.0","name":"n","type":"firewall"}`, nil, "firewall"},
	} {
		t.Run(name, func(t *testing.T) {
			env := c.env
			if env == nil {
				env = environment()
			}
			call, why := new(Plugins).Plan(filepath.Join(plugins, c.plugin), []byte(c.conf), env)
			switch {
			case c.why == "" && (why != nil || call == nil):
				t.Errorf("Plan = %v, %v, want a call", call, why)
			case c.why != "" && (why == nil || !strings.Contains(why.Error(), c.why)):
				t.Errorf("Plan gave the reason %v, want one that contains %q", why, c.why)
			}
		})
	}
}

// TestReference checks that match accepts only builds of the reference plugins, and looks at changed files again.
func TestReference(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "bridge")
	copyOf := func(source string) {
		t.Helper()
		from, err := os.Open(source)
		if err != nil {
			t.Fatal(err)
		}
		defer from.Close()
		to, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer to.Close()
		if _, err := io.Copy(to, from); err != nil {
			t.Fatal(err)
		}
	}
	var r references
	if r.match(path, "bridge") {
		t.Error("match accepts a missing file")
	}
	copyOf(filepath.Join(plugins, "bridge"))
	if !r.match(path, "bridge") || r.match(path, "ridge") || r.match(path, "main/bridge") {
		t.Error("match does not accept the reference's bridge, or accepts it under a wrong name")
	}
	copyOf(filepath.Join(plugins, "ptp"))
	if r.match(path, "bridge") {
		t.Error("match accepts another plugin whose file is called bridge")
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r.match(path, "bridge") {
		t.Error("match accepts a script called bridge")
	}
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap"} {
		if !r.match(filepath.Join(plugins, name), name) {
			t.Errorf("match does not accept this system's %s", name)
		}
	}
}

// TestPanic checks that a panic on the namespace's thread goes on in the call.
func TestPanic(t *testing.T) {
	err := guard.Call(slog.New(slog.DiscardHandler), "plugin", func() error {
		return inNetnsOfTest(func() { panic("on its thread") })
	})
	if !errdefs.IsInternal(err) || !strings.Contains(err.Error(), "on its thread") {
		t.Errorf("inNetns = %v, want an error with the panic's text", err)
	}
}

func FuzzPlan(f *testing.F) {
	f.Add("bridge", plainBridge, "IgnoreUnknown=1")
	f.Add("portmap", `{"cniVersion":"1.0.0","prevResult":null}`, "")
	f.Fuzz(func(t *testing.T, plugin, conf, args string) {
		call, why := new(Plugins).Plan(filepath.Join(plugins, filepath.Base(plugin)), []byte(conf), environment("CNI_ARGS="+args))
		if (call == nil) == (why == nil) {
			t.Errorf("Plan = %v, %v, want either a call or a reason", call, why)
		}
	})
}

// inNetnsOfTest runs fn through inNetns, in the test's own namespace.
func inNetnsOfTest(fn func()) error {
	home, err := netthread.Home()
	if err != nil {
		return err
	}
	defer unix.Close(home)
	return inNetns(home, func(*netlink.Handle) error { fn(); return nil })
}
