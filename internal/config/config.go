package config

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// DefaultPath is the configuration file that the daemon reads by default.
const DefaultPath = "/etc/tripod/config.toml"

//go:embed default.toml
var defaults []byte

// Config is the whole configuration. default.toml explains each key.
type Config struct {
	Root     string   `toml:"root"`
	State    string   `toml:"state"`
	GRPC     GRPC     `toml:"grpc"`
	Log      Log      `toml:"log"`
	Image    Image    `toml:"image"`
	Network  Network  `toml:"network"`
	Linux    Linux    `toml:"linux"`
	Wasm     Wasm     `toml:"wasm"`
	VM       VM       `toml:"vm"`
	NRI      NRI      `toml:"nri"`
	CDI      CDI      `toml:"cdi"`
	Handlers Handlers `toml:"handlers"`
	Node     Node     `toml:"node"`
	Userns   Userns   `toml:"userns"`
	// Delegates are the other CRI endpoints, in the order in which annotations and image prefixes are compared.
	Delegates []Delegate `toml:"delegate"`
	Backends  Backends   `toml:"backends"`
	Route     Route      `toml:"route"`
	Metrics   Metrics    `toml:"metrics"`
	Tracing   Tracing    `toml:"tracing"`
	Debug     Debug      `toml:"debug"`
	Edge      Edge       `toml:"edge"`
	Broker    Broker     `toml:"broker"`

	Orchestrator Orchestrator `toml:"orchestrator"`
	Connections  Connections  `toml:"connections"`
}

// GRPC configures the CRI socket and the streaming server.
type GRPC struct {
	Socket           string `toml:"socket"`
	StreamingAddress string `toml:"streaming_address"`
}

type Log struct {
	Level            string `toml:"level"`
	Format           string `toml:"format"`
	ContainerSizeMax int64  `toml:"container_size_max"`
}

// Image configures the content store and pulls.
type Image struct {
	ContainersDir          string   `toml:"containers_dir"`
	HostsDirs              []string `toml:"hosts_dirs"`
	Pinned                 []string `toml:"pinned"`
	MaxConcurrentDownloads int      `toml:"max_concurrent_downloads"`
	RangesPerBlob          int      `toml:"ranges_per_blob"`
	PullProgressTimeout    Duration `toml:"pull_progress_timeout"`
	DockerConfig           string   `toml:"docker_config"`
	RefuseDowngrades       bool     `toml:"refuse_downgrades"`
	SignaturePolicy        string   `toml:"signature_policy"`
	RegistriesDir          string   `toml:"registries_dir"`

	Peers  ImagePeers  `toml:"peers"`
	Mirror ImageMirror `toml:"mirror"`
}

// ImagePeers configures from which other nodes pulls take images.
type ImagePeers struct {
	Hosts       []string `toml:"hosts"`
	First       bool     `toml:"first"`
	Tags        bool     `toml:"tags"`
	CA          string   `toml:"ca"`
	Certificate string   `toml:"certificate"`
	Key         string   `toml:"key"`
}

// ImageMirror configures the server from which other nodes take images.
type ImageMirror struct {
	Address        string   `toml:"address"`
	Certificate    string   `toml:"certificate"`
	Key            string   `toml:"key"`
	ClientCA       string   `toml:"client_ca"`
	Repositories   []string `toml:"repositories"`
	Private        bool     `toml:"private"`
	MaxTransfers   int      `toml:"max_transfers"`
	BytesPerSecond int      `toml:"bytes_per_second"`
}

// Network configures CNI.
type Network struct {
	ConfDir       string         `toml:"conf_dir"`
	BinDirs       []string       `toml:"bin_dirs"`
	NetnsDir      string         `toml:"netns_dir"`
	PluginTimeout Duration       `toml:"plugin_timeout"`
	InProcess     bool           `toml:"in_process"`
	Default       DefaultNetwork `toml:"default"`
}

// DefaultNetwork is the network of a node without a CNI configuration.
type DefaultNetwork struct {
	Enabled  bool   `toml:"enabled"`
	Bridge   string `toml:"bridge"`
	SubnetV4 string `toml:"subnet_v4"`
	SubnetV6 string `toml:"subnet_v6"`
	MTU      int    `toml:"mtu"`
}

// Linux configures the backend for OCI containers.
type Linux struct {
	Runtime      string `toml:"runtime"`
	Conmon       string `toml:"conmon"`
	Catatonit    string `toml:"catatonit"`
	CgroupDriver string `toml:"cgroup_driver"`
	CgroupParent string `toml:"cgroup_parent"`
}

// Wasm configures the backend for components.
type Wasm struct {
	Program         string   `toml:"program"`
	Worker          string   `toml:"worker"`
	User            int      `toml:"user"`
	Instances       int      `toml:"instances"`
	MaxMemory       uint64   `toml:"max_memory"`
	MaxConcurrency  int      `toml:"max_concurrency"`
	MaxFiles        int64    `toml:"max_files"`
	MaxHandles      int64    `toml:"max_handles"`
	MaxHostBytes    int64    `toml:"max_host_bytes"`
	MaxSockets      int64    `toml:"max_sockets"`
	KeyvalueBytes   int64    `toml:"keyvalue_bytes"`
	KeyvalueKeys    int64    `toml:"keyvalue_keys"`
	CompileTimeout  Duration `toml:"compile_timeout"`
	CompileMemory   int64    `toml:"compile_memory"`
	CORSOrigins     []string `toml:"cors_origins"`
	CompileParallel int      `toml:"compile_parallel"`
	QuickCode       bool     `toml:"quick_code"`
	// CompiledLayers are the rules about compiled code in images; without a rule it is not used.
	CompiledLayers []CompiledLayer `toml:"compiled_layer"`
}

// CompiledLayer is one [[wasm.compiled_layer]]: repositories, and files with the keys whose signed code is used from there.
type CompiledLayer struct {
	Repositories []string `toml:"repositories"`
	Keys         []string `toml:"keys"`
}

// VM configures the backend for virtual machines.
type VM struct {
	Driver          string   `toml:"driver"`
	Accel           string   `toml:"accel"`
	Emulator        string   `toml:"emulator"`
	Virtiofsd       string   `toml:"virtiofsd"`
	GuestDir        string   `toml:"guest_dir"`
	Templates       int      `toml:"templates"`
	TemplateScope   string   `toml:"template_scope"`
	LibvirtURI      string   `toml:"libvirt_uri"`
	UIDBase         int      `toml:"uid_base"`
	UIDCount        int      `toml:"uid_count"`
	DefaultMemory   uint64   `toml:"default_memory"`
	DefaultCPUs     int      `toml:"default_cpus"`
	MemoryOverhead  uint64   `toml:"memory_overhead"`
	BootTimeout     Duration `toml:"boot_timeout"`
	ConsoleBuffer   uint64   `toml:"console_buffer"`
	ImagePrefix     string   `toml:"image_prefix"`
	TranslationsDir string   `toml:"translations_dir"`
}

// Handlers configures what all kinds of pods have in common.
type Handlers struct {
	Linux Handler `toml:"linux"`
	Wasm  Handler `toml:"wasm"`
	VM    Handler `toml:"vm"`
}

// Handler configures one kind of pods.
type Handler struct {
	AllowedAnnotations []string `toml:"allowed_annotations"`
}

// CDI configures devices that are requested by their names of the Container Device Interface.
type CDI struct {
	SpecDirs []string `toml:"spec_dirs"`
}

// NRI configures the plugins of the node.
type NRI struct {
	Enabled                bool     `toml:"enabled"`
	Socket                 string   `toml:"socket"`
	DisableConnections     bool     `toml:"disable_connections"`
	PluginPath             string   `toml:"plugin_path"`
	PluginConfigPath       string   `toml:"plugin_config_path"`
	RegistrationTimeout    Duration `toml:"registration_timeout"`
	SynchronizationTimeout Duration `toml:"synchronization_timeout"`
	RequestTimeout         Duration `toml:"request_timeout"`
}

// Node configures the pod pool.
type Node struct {
	DefaultHandler       string            `toml:"default_handler"`
	HandlerAliases       map[string]string `toml:"handler_aliases,inline"`
	OperationTimeout     Duration          `toml:"operation_timeout"`
	StatsInterval        Duration          `toml:"stats_interval"`
	ComponentLabelPrefix string            `toml:"component_label_prefix"`
}

// Userns configures the user namespaces of pods.
type Userns struct {
	// Range is for pods whose callers ask for a user namespace but choose no range, unlike the kubelet.
	Range IDRange `toml:"range"`
}

type Backends struct {
	Linux bool `toml:"linux"`
	Wasm  bool `toml:"wasm"`
	VM    bool `toml:"vm"`
	Fake  bool `toml:"fake"`
}

// Route configures the node's own addresses for requests to components.
type Route struct {
	Address          string `toml:"address"`
	CleartextAddress string `toml:"cleartext_address"`
	Certificate      string `toml:"certificate"`
	Key              string `toml:"key"`
	ClientCA         string `toml:"client_ca"`
}

// Metrics configures the endpoint for Prometheus.
type Metrics struct {
	Address string `toml:"address"`
}

// Connections limits the connections to each address that users other than root can reach.
type Connections struct {
	Max           int      `toml:"max"`
	MaxPerPeer    int      `toml:"max_per_peer"`
	HeaderTimeout Duration `toml:"header_timeout"`
	IdleTimeout   Duration `toml:"idle_timeout"`
	MaxHeader     int      `toml:"max_header"`
}

// Tracing configures the export of spans to an OpenTelemetry collector.
type Tracing struct {
	Endpoint string `toml:"endpoint"`
}

// Debug configures the daemon's socket for debugging.
type Debug struct {
	Socket string `toml:"socket"`
}

// Duration is a time.Duration. TOML files write it as a string, such as "1m30s".
type Duration time.Duration

// IDRange is a range of user and group IDs, written as in subuid(5): first:count.
type IDRange struct{ First, Count uint32 }

func (r *IDRange) UnmarshalText(text []byte) error {
	first, count, ok := strings.Cut(string(text), ":")
	from, err1 := strconv.ParseUint(first, 10, 32)
	n, err2 := strconv.ParseUint(count, 10, 32)
	if !ok || err1 != nil || err2 != nil {
		return fmt.Errorf("%q is not a range of IDs such as \"1879048192:268304384\" (first:count)", text)
	}
	*r = IDRange{uint32(from), uint32(n)}
	return nil
}

func (r IDRange) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "%d:%d", r.First, r.Count), nil
}

func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as \"90s\" or \"2m\"", text)
	}
	*d = Duration(v)
	return nil
}

func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// DefaultTOML returns the commented defaults.
func DefaultTOML() string { return string(defaults) }

// Default returns the configuration of a node without a configuration file.
func Default() *Config {
	c := &Config{}
	if err := decode(c, defaults, "default.toml"); err != nil {
		panic(err) // the document is embedded, and a test decodes it
	}
	return c
}

// Parse decodes a document over the defaults. name is the document's name in errors. An unknown key is an error.
func Parse(document []byte, name string) (*Config, error) {
	c := Default()
	aliases := c.Node.HandlerAliases
	c.Node.HandlerAliases = nil // a table in the document would be merged into the default table
	if err := decode(c, document, name); err != nil {
		return nil, err
	}
	if c.Node.HandlerAliases == nil {
		c.Node.HandlerAliases = aliases
	}
	return c, nil
}

// Load reads the file at path. If path is empty, Load reads DefaultPath or, if there is no such file, returns the
// defaults.
func Load(path string) (*Config, error) {
	name := cmp.Or(path, DefaultPath)
	document, err := os.ReadFile(name)
	if path == "" && errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return Parse(document, name)
}

// TOML encodes the configuration, without comments.
func (c *Config) TOML() ([]byte, error) { return toml.Marshal(c) }

func decode(c *Config, document []byte, name string) error {
	err := toml.NewDecoder(strings.NewReader(string(document))).DisallowUnknownFields().Decode(c)
	var unknown *toml.StrictMissingError
	if errors.As(err, &unknown) {
		errs := make([]error, 0, len(unknown.Errors))
		for i := range unknown.Errors {
			row, _ := unknown.Errors[i].Position()
			errs = append(errs, fmt.Errorf("%s:%d: unknown key %q (`tripod config default` lists all)",
				name, row, strings.Join(unknown.Errors[i].Key(), ".")))
		}
		return errors.Join(errs...)
	}
	var bad *toml.DecodeError
	if errors.As(err, &bad) {
		row, column := bad.Position()
		return fmt.Errorf("%s:%d:%d: %s", name, row, column, strings.TrimPrefix(bad.Error(), "toml: "))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
