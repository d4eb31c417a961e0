package main

import "strings"

// tables is the data that the selection depends on besides the import graph. Its tests use a small one.
type tables struct {
	rooms []room
	heavy map[string]bool
	costs map[string]int
}

var ours = tables{rooms, heavy, costs}

// room says what a change in its directories needs besides unit tests.
type room struct {
	dirs []string
	// e2e and crash are patterns of tests in test/e2e and test/crash. Their tests take one to five seconds each, unless
	// they are about machines.
	e2e, crash string
	// dependents is how many seconds of dependents' unit tests a change is worth.
	dependents int
}

const (
	// leaf is for packages that few others use, busy for those that most pods pass through.
	leaf, busy = 40, 150
	// cheap is what a unit test may take after a changed dependency.
	cheap = 10
	// core is what every change of the daemon's middle must keep: the life of pods and containers, and restarts.
	core = `^Test(PodSandbox|ContainerOperations|Idempotence|Exit|EveryRPC|Logs|ExecSync|Networking|KubeletStartUp|FaultN13CarrierIsKilled)$`
	// linux are the tests of Linux pods beyond the core.
	linux = `^Test(Process|VolumesAndDevices|Users|Capabilities|Privileged|Seccomp|NoNewPrivs|Sysctls|NamespaceOption|ReadOnlyMounts|MountPropagation|ImageVolume|MultipleContainers|Resources|UserNamespaces|ExecStream|Attach)$`
	// one pod of each other kind.
	otherKinds = `^Test(VMPod|VMOCIPod|WasmServesGRPC)$`

	machines = "internal/sandbox/vm"
	contract = "internal/sandbox"
)

// rooms are searched for the longest directory that contains the changed package.
var rooms = []room{
	{dirs: []string{"internal/crilog"}, e2e: `^TestLogs$`, dependents: leaf},
	{dirs: []string{"internal/stream"}, e2e: `^Test(Logs|ExecStream|ExecSync|Attach|PortForward|VanishingClients)$`, dependents: leaf},
	{dirs: []string{"internal/cri", "internal/node"}, e2e: core, crash: `^TestN2InitProcessIsKilled$`, dependents: busy},
	{dirs: []string{"internal/cri/delegate"}, e2e: `^Test(HandlerAliases|RuntimeClasses)`, dependents: leaf},
	{dirs: []string{"internal/sandbox"}, e2e: either(core, otherKinds), crash: `^TestN2`, dependents: busy},
	{dirs: []string{"internal/sandbox/linux"}, e2e: either(core, linux, `^TestVMOCIPod$`), crash: `^TestN2`, dependents: busy},
	{dirs: []string{"internal/sandbox/wasm", "internal/component"},
		e2e: `^Test(WasmServesGRPC|WasmProtocol|WasmTLS|WasmRestart|WasmDrains|WasmCommands|WasmHTTP|WasmImages|WasmConfigAndLogging|WasmEgress|WasmRoute|WasmSockets|WasmNames|WasmStats|WasmStandardStreams|W2TrapInOneRequest|W5WorkerIsKilled)$`, dependents: busy},
	{dirs: []string{"internal/sandbox/vm"}, e2e: `^Test(VMPod|VMOCIPod|VMConsole|VMExec|VMDisk|VMVolumes|VMRefused|V1Killed)$`,
		dependents: busy},
	{dirs: []string{"internal/sandbox/vm/oci"}, e2e: `^TestVMOCI`, dependents: leaf},
	{dirs: []string{"internal/edge", "internal/channel", "internal/loglimit"}, e2e: `^TestEdge`, dependents: leaf},
	{dirs: []string{"internal/image"}, e2e: `^Test(Image|Images|PullFailures|SplitImageFileSystem)`, crash: `^TestN1DuringPull$`,
		dependents: leaf},
	{dirs: []string{"internal/network"},
		e2e:   `^Test(Networking|NetworkNotReady|DualStack|MultipleContainers|PortForward|KubeletWaitsForTheNetwork|KubeletTellsThePodCIDR)$`,
		crash: `^TestN4NetworkPluginMisbehaves$`, dependents: leaf},
	{dirs: []string{"internal/play"}, e2e: `^TestRunManifests$`, dependents: leaf},
	{dirs: []string{"internal/cli"}, e2e: `^Test(RunManifests|Top|EventsAndProgress|EdgeCommandLine|RuntimeInfo|WasmPush)$`, dependents: leaf},
	{dirs: []string{"internal/cli/scaffold"}, e2e: `^TestWasmComponentNew$`, dependents: leaf},
	{dirs: []string{"cmd", "internal/config"},
		e2e:        `^Test(KubeletStartUp|PodSandbox|ContainerOperations|RuntimeInfo|RuntimeClasses|HandlerAliases|FaultN13CarrierIsKilled)`,
		dependents: leaf},
	{dirs: []string{"cmd/tripod-wasm"}, e2e: `^TestWasm(ServesGRPC|Restart)$`, dependents: leaf},
	{dirs: []string{"cmd/tripod-agent", "cmd/tripod-vmwrap"}, e2e: `^TestVM(Exec|Libvirt)$`, dependents: leaf},
	{dirs: []string{"cmd/tripod-guest", "cmd/tripod-init"}, e2e: `^TestVMOCI`, dependents: leaf},
	{dirs: []string{"internal/nri"}, e2e: `^TestNRI`, dependents: leaf},
	{dirs: []string{"internal/cdi"}, e2e: `^TestCDI$`, dependents: leaf},
	{dirs: []string{"internal/stats", "internal/cgroup"}, e2e: `^Test(ContainerStatsLists|Figures|Resources|Top|Metrics)$`, dependents: leaf},
	{dirs: []string{"internal/metrics"}, e2e: `^Test(Metrics|WasmMetrics|EdgeMetrics)$`, dependents: leaf},
	{dirs: []string{"internal/connlimit"}, e2e: `^TestC11`, dependents: leaf},
	{dirs: []string{"internal/guard"}, e2e: `^TestN12PanicEndsItsRequest$`, dependents: leaf},
	{dirs: []string{"internal/spans"}, e2e: `^TestSpansOfCalls$`, dependents: leaf},
	{dirs: []string{"internal/health"}, e2e: `^Test(RuntimeInfo|NetworkNotReady)$`, dependents: leaf},
	{dirs: []string{"internal/process", "internal/fdpass"}, e2e: `^Test(Exit|Process|ExecSync|FaultN13)`, crash: `^TestN2InitProcessIsKilled$`,
		dependents: leaf},
	{dirs: []string{"internal/synced"}, e2e: `^TestSyncedWrites$`, dependents: leaf},
	{dirs: []string{"internal/boltfile", "internal/atomicfile"}, e2e: `^Test(PodSandbox|Idempotence|Images)$`,
		crash: `^TestN7RootIsNotMounted$`, dependents: leaf},
	{dirs: []string{"internal/tlsfile"}, e2e: `^TestWasmTLS$`, dependents: leaf},
	{dirs: []string{"internal/unixsocket"}, e2e: `^Test(PodSandbox|EdgePair)$`, dependents: leaf},
	{dirs: []string{"test/harness", "test/loopdev", "test/until"}, e2e: core, dependents: leaf},
	{dirs: []string{"test/sandboxtest", "test/fake", "test/edgetest", "test/races", "hack"}, dependents: busy},
}

// programs are the commands that the tests of packages build, which no import shows. The cache of go test does not know
// what they are made from, so these tests always run.
var programs = map[string][]string{
	"internal/edge/runtime/unitpods":     {"cmd/tripod-wasm"},
	"internal/sandbox/vm/internal/agent": {"cmd/tripod-agent"},
}

// roomless lists the directories below internal that need no test with a daemon: their unit tests cover them.
var roomless = []string{"internal/failpoint", "internal/idle", "internal/keys", "internal/lazyregexp", "internal/origin"}

// heavy are the packages whose tests boot machines.
var heavy = map[string]bool{
	"internal/sandbox/vm":                  true,
	"internal/sandbox/vm/internal/agent":   true,
	"internal/sandbox/vm/internal/libvirt": true,
	"internal/sandbox/vm/internal/qemu":    true,
	"internal/sandbox/vm/internal/tap":     true,
}

// costs are the seconds of the slow packages' unit tests on two cores, without the race detector. Every other package
// counts as usual, which is mostly for linking. Correct them when `make quick` has become slow; nothing else needs them.
var costs = map[string]int{
	"cmd/tripod":                               25,
	"internal/cli":                             20,
	"internal/cli/scaffold":                    25,
	"internal/component/describe":              90,
	"internal/cri":                             25,
	"internal/edge/runtime/unitpods":           22,
	"internal/node":                            25,
	"internal/sandbox/linux":                   80,
	"internal/sandbox/linux/internal/oci":      6,
	"internal/sandbox/vm":                      90,
	"internal/sandbox/vm/internal/agent":       30,
	"internal/sandbox/vm/internal/console":     6,
	"internal/sandbox/vm/internal/libvirt":     120,
	"internal/sandbox/vm/internal/qemu":        120,
	"internal/sandbox/vm/internal/tap":         30,
	"internal/sandbox/wasm":                    90,
	"internal/sandbox/wasm/internal/dataplane": 90,
	"internal/sandbox/wasm/internal/worker":    30,
	"internal/sandbox/wasm/program":            120,
	"internal/stream":                          20,
	"test/sandboxtest":                         6,
}

const usual = 4

// cost returns the seconds of a package's unit tests.
func (t *tables) cost(name string) int {
	if seconds, ok := t.costs[name]; ok {
		return seconds
	}
	return usual
}

// rules are the packages whose tests read the sources of all packages, so they follow no import.
var rules = []string{"hack/observe", "test/deps", "test/prose"}

// daemonTests are the packages whose tests start daemons.
var daemonTests = []string{"test/e2e", "test/crash"}

// documents are the files that the unit tests of packages elsewhere compare with their code.
var documents = map[string][]string{
	"docs/edge-states.md":     {"internal/edge/manager"},
	"docs/manifests.md":       {"internal/play"},
	"docs/states.md":          {"internal/node"},
	"docs/vm-fields.md":       {"internal/sandbox/vm"},
	"docs/vm.md":              {"internal/sandbox/vm/internal/annotations"},
	"docs/wasm-advisories.md": {"internal/component/engine"},
	"docs/wasm-fields.md":     {"internal/sandbox/wasm"},
}

// roomsOf returns the rooms of packages, once each, in the order of the table.
func (t *tables) roomsOf(packages []string) []room {
	found := map[int]bool{}
	for _, name := range packages {
		best, length := -1, 0
		for i, room := range t.rooms {
			for _, dir := range room.dirs {
				if below(name, dir) && len(dir) > length {
					best, length = i, len(dir)
				}
			}
		}
		found[best] = true
	}
	var in []room
	for i, room := range t.rooms {
		if found[i] {
			in = append(in, room)
		}
	}
	return in
}

// below reports whether a package is a directory or below it.
func below(name, dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

func either(patterns ...string) string { return strings.Join(patterns, "|") }
