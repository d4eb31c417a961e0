package config

import (
	"encoding"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestDefaultIsValidAndDerivesPaths(t *testing.T) {
	c := Default()
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	if c.GRPC.Socket != "/run/tripod/tripod.sock" || c.Network.NetnsDir != "/run/tripod/netns" {
		t.Errorf("derived paths: got socket %q and netns_dir %q, want them below /run/tripod", c.GRPC.Socket, c.Network.NetnsDir)
	}
	c = Default()
	c.State = "/run/other"
	if err := c.Complete(); err != nil || c.GRPC.Socket != "/run/other/tripod.sock" || c.Network.NetnsDir != "/run/other/netns" {
		t.Errorf("derived paths with another state: got %q, %q, %v; want them below /run/other", c.GRPC.Socket, c.Network.NetnsDir, err)
	}
}

// keys lists the TOML names of all fields, with their section.
func keys(t reflect.Type, section string) []string {
	var all []string
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("toml"), ",")
		if f.Type.Kind() == reflect.Struct && !f.Type.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
			all = append(all, keys(f.Type, strings.TrimPrefix(section+"."+name, "."))...)
		} else {
			all = append(all, section+" "+name)
		}
	}
	return all
}

func TestDefaultTOMLNamesEveryKeyWithAComment(t *testing.T) {
	section, comment := "", false
	documented := map[string]bool{}
	key := regexp.MustCompile(`^([a-z0-9_]+) = `)
	for line := range strings.Lines(DefaultTOML()) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "["):
			section, comment = strings.Trim(line, "[]"), false
		case strings.HasPrefix(line, "#"):
			comment = true
		case line == "":
			comment = false
		default:
			m := key.FindStringSubmatch(line)
			if m == nil {
				t.Fatalf("line %q has no key", line)
			}
			if !comment {
				t.Errorf("[%s] %s has no comment", section, m[1])
			}
			documented[section+" "+m[1]] = true
			comment = false
		}
	}
	all := keys(reflect.TypeFor[Config](), "")
	for _, k := range all {
		if !documented[k] {
			t.Errorf("default.toml does not have the key %q", k)
		}
	}
	if len(documented) != len(all) {
		t.Errorf("default.toml has %d keys, Config has %d", len(documented), len(all))
	}
}

func TestRoundTrip(t *testing.T) {
	c, err := Parse([]byte(`
root = "/srv/t"
[image]
hosts_dirs = ["/a"]
pinned = ["x", "y"]
pull_progress_timeout = "90s"
[network.default]
mtu = 1400
[backends]
fake = true
`), "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	if c.Root != "/srv/t" || c.State != "/run/tripod" || !reflect.DeepEqual(c.Image.HostsDirs, []string{"/a"}) ||
		time.Duration(c.Image.PullProgressTimeout) != 90*time.Second || c.Network.Default.MTU != 1400 || !c.Backends.Fake {
		t.Errorf("Parse() = %+v, want the document's values over the defaults", c)
	}
	text, err := c.TOML()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(text, "again")
	if err != nil {
		t.Fatalf("Parse of the encoded configuration: %v in\n%s", err, text)
	}
	if !reflect.DeepEqual(c, again) {
		t.Errorf("round trip gave\n%+v\nwant\n%+v", again, c)
	}
}

func TestBadDocuments(t *testing.T) {
	for _, test := range []struct{ name, document, want string }{
		{"unknown key", "root = \"/a\"\nrooot = 1\n", `f.toml:2: unknown key "rooot"`},
		{"unknown keys, all of them", "[grpc]\nsokket = 1\n[imag]\nx = 2\n",
			"f.toml:2: unknown key \"grpc.sokket\" (`tripod config default` lists all)\nf.toml:3: unknown key \"imag\""},
		{"wrong type", "[image]\nmax_concurrent_downloads = \"three\"\n", "f.toml:2"},
		{"bad duration", "[node]\noperation_timeout = \"soon\"\n", `"soon" is not a duration`},
		{"not TOML", "root = \n", "f.toml:1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse([]byte(test.document), "f.toml")
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestCompleteNamesAllErrorsAtOnce(t *testing.T) {
	c := Default()
	c.Root = "relative"
	c.State = "/run/" + strings.Repeat("x", 120)
	c.GRPC.StreamingAddress = "127.0.0.1:http"
	c.Log.Level = "loud"
	c.Log.Format = "xml"
	c.Image.MaxConcurrentDownloads = 0
	c.Network.BinDirs = nil
	c.Network.Default = DefaultNetwork{Bridge: "much-too-long-for-a-bridge", SubnetV4: "10.0.0.1/8", SubnetV6: "10.1.0.0/16", MTU: 12}
	c.Node.OperationTimeout, c.Node.StatsInterval = 0, -1
	c.Linux.CgroupDriver = "cgroups"
	c.Metrics.Address = "9464"
	c.Route = Route{Address: "everywhere", CleartextAddress: "8080", Certificate: "relative.pem", ClientCA: "/ca.pem"}
	c.Tracing.Endpoint = "localhost:4317"
	c.VM = VM{Driver: "xen", Accel: "fast", Emulator: "qemu", Virtiofsd: "virtiofsd", UIDCount: -1, BootTimeout: -1, ImagePrefix: "virtlet",
		TranslationsDir: "images"}
	err := c.Complete()
	for _, key := range []string{"root:", "grpc.socket:", "grpc.streaming_address:", "log.level:", "log.format:",
		"image.max_concurrent_downloads:", "network.bin_dirs:", "network.default.bridge:", "network.default.subnet_v4:",
		"network.default.subnet_v6:", "network.default.mtu:", "node.operation_timeout:", "node.stats_interval:", "linux.cgroup_driver:",
		"metrics.address:",
		"route.address:", "route.cleartext_address:", "route.certificate:", "route.key:", "tracing.endpoint:", "vm.driver:", "vm.accel:",
		"vm.emulator:", "vm.virtiofsd:", "vm.uid_base:", "vm.uid_count:", "vm.default_memory:", "vm.default_cpus:", "vm.memory_overhead:",
		"vm.console_buffer:", "vm.boot_timeout:", "vm.image_prefix:",
		"vm.translations_dir:"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("error does not name %s: %v", key, err)
		}
	}
	c = Default()
	c.State = c.Root + "/run"
	if err := c.Complete(); err == nil || !strings.Contains(err.Error(), "must not contain each other") {
		t.Errorf("state below root: got error %v, want one", err)
	}
}

// TestHandlerAliases: a table in the document replaces the default, in either notation, and survives `config show`.
func TestCompiledLayers(t *testing.T) {
	const keys = "\nkeys = [\"/etc/tripod/fleet.pub\"]"
	for name, c := range map[string]struct{ rule, says string }{
		"a registry":    {`repositories = ["registry.example"]` + keys, ""},
		"with a port":   {`repositories = ["127.0.0.1:5000", "127.0.0.1:5000/team"]` + keys, ""},
		"a repository":  {`repositories = ["registry.example/team/app"]` + keys, ""},
		"Docker's":      {`repositories = ["docker.io/library"]` + keys, ""},
		"no repository": {keys, "wasm.compiled_layer[0]: needs repositories and keys"},
		"no key":        {`repositories = ["registry.example"]`, "wasm.compiled_layer[0]: needs repositories and keys"},
		"short name":    {`repositories = ["team/app"]` + keys, `wasm.compiled_layer[0].repositories: "team/app"`},
		"all":           {`repositories = [""]` + keys, `wasm.compiled_layer[0].repositories: ""`},
		"pattern":       {`repositories = ["registry.example/*"]` + keys, `wasm.compiled_layer[0].repositories: "registry.example/*"`},
		"tag":           {`repositories = ["registry.example/app:1"]` + keys, `wasm.compiled_layer[0].repositories: "registry.example/app:1"`},
		"slash":         {`repositories = ["registry.example/team/"]` + keys, `wasm.compiled_layer[0].repositories: "registry.example/team/"`},
		"relative key":  {`repositories = ["registry.example"]` + "\nkeys = [\"fleet.pub\"]", `wasm.compiled_layer[0].keys: "fleet.pub"`},
	} {
		t.Run(name, func(t *testing.T) {
			parsed, err := Parse([]byte("[[wasm.compiled_layer]]\n"+c.rule), "test")
			if err != nil {
				t.Fatal(err)
			}
			switch err := parsed.Complete(); {
			case c.says == "" && err != nil:
				t.Errorf("Complete = %v, want nil", err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
				t.Errorf("Complete = %v, want %q in it", err, c.says)
			}
		})
	}
}

func TestHandlerAliases(t *testing.T) {
	for document, want := range map[string]map[string]string{
		"":                                   {"runc": "linux", "crun": "linux"},
		"[node]\ndefault_handler = \"vm\"\n": {"runc": "linux", "crun": "linux"},
		"[node]\nhandler_aliases = {}\n":     {},
		"[node.handler_aliases]\nkata = \"vm\"\n":       {"kata": "vm"},
		"[node]\nhandler_aliases = { kata = \"vm\" }\n": {"kata": "vm"},
	} {
		c, err := Parse([]byte(document), "test")
		if err != nil || c.Complete() != nil || !maps.Equal(c.Node.HandlerAliases, want) {
			t.Errorf("Parse(%q): got aliases %v, %v, %v; want %v", document, c.Node.HandlerAliases, err, c.Complete(), want)
			continue
		}
		text, err := c.TOML()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Parse(text, "again"); err != nil || !maps.Equal(again.Node.HandlerAliases, want) {
			t.Errorf("Parse of the encoded %q: got aliases %v, %v; want %v", document, again.Node.HandlerAliases, err, want)
		}
	}
	for alias, c := range map[string]struct{ handler, says string }{
		"kata":    {"firecracker", `node.handler_aliases.kata: "firecracker" is not one of linux, wasm, vm`},
		"wasm":    {"linux", `node.handler_aliases.wasm: "wasm" is already the name of a handler`},
		"self":    {"self", `node.handler_aliases.self: "self" is an alias; use the handler`},
		"first":   {"runc", `node.handler_aliases.first: "runc" is an alias; use the handler`},
		"no name": {"linux", `node.handler_aliases.no name: "no name" is not a DNS label`},
		"":        {"linux", `"" is not a DNS label`},
	} {
		config := Default()
		config.Node.HandlerAliases[alias] = c.handler
		if err := config.Complete(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("alias %q = %q: got error %v, want one with %q", alias, c.handler, err, c.says)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	if _, err := Load(path); err == nil {
		t.Error("Load of a missing file succeeded, want an error")
	}
	if err := os.WriteFile(path, []byte("state = \"/run/x\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(path); err != nil || c.State != "/run/x" {
		t.Errorf("Load = %+v, %v; want state /run/x", c, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(DefaultTOML()))
	f.Add([]byte("root = 1\n[grpc]\nx.y = [1, {a = 2}]\n"))
	f.Fuzz(func(t *testing.T, document []byte) {
		c, err := Parse(document, "fuzz")
		if (c == nil) == (err == nil) {
			t.Fatalf("Parse = %v, %v; want either a configuration or an error", c, err)
		}
		if c != nil {
			_ = c.Complete()
		}
	})
}
