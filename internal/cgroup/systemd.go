package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/big"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"
)

// With the systemd driver on cgroup v2, systemd owns the hierarchy: it removes the cgroups and resets the files that are not of
// its units, whenever it likes (systemd's CGROUP_DELEGATION.md). So our cgroups are units: a scope for each container, which the OCI
// runtime makes, a service for each machine and for each worker of a pod's own, a slice for each pod that has none from a kubelet,
// and a service for the helpers of all pods.

// unitTime limits one order to systemd.
const unitTime = 30 * time.Second

// helpersUnit is the service whose cgroup the helpers share, and helpersDir the path of that cgroup.
const (
	helpersUnit = Mark + "helpers.service"
	helpersDir  = "/tripod.slice/" + helpersUnit
)

// units orders units of systemd. It connects when it is first needed, and again when the connection has ended.
var units manager

type manager struct {
	mu   sync.Mutex
	conn *systemd.Conn
}

func (m *manager) connection() (*systemd.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conn != nil && m.conn.Connected() {
		return m.conn, nil
	}
	if m.conn != nil {
		m.conn.Close()
		m.conn = nil
	}
	conn, err := systemd.NewWithContext(context.Background()) // the connection ends with its context
	if err != nil {
		return nil, fmt.Errorf("connect to systemd: %w: %w", err, errdefs.ErrUnavailable)
	}
	m.conn = conn
	return conn, nil
}

// do gives systemd an order and waits until the order is carried out.
func (m *manager) do(ctx context.Context, unit string, order func(context.Context, *systemd.Conn, chan<- string) (int, error)) error {
	conn, err := m.connection()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, unitTime)
	defer cancel()
	result := make(chan string, 1)
	if _, err := order(ctx, conn, result); err != nil {
		return fmt.Errorf("systemd unit %s: %w: %w", unit, err, errdefs.ErrUnavailable)
	}
	select {
	case r := <-result:
		if r != "done" {
			return fmt.Errorf("systemd unit %s: the job ended with %q: %w", unit, r, errdefs.ErrUnavailable)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("systemd unit %s: %w", unit, context.Cause(ctx))
	}
}

// start makes a transient unit. An existing unit of that name is not an error.
func (m *manager) start(ctx context.Context, unit string, properties ...systemd.Property) error {
	err := m.do(ctx, unit, func(ctx context.Context, c *systemd.Conn, ch chan<- string) (int, error) {
		return c.StartTransientUnitContext(ctx, unit, "replace", properties, ch)
	})
	if isDBus(err, "org.freedesktop.systemd1.UnitExists") {
		return nil
	}
	return err
}

// stop stops a unit, which ends its processes. A missing unit is not an error.
func (m *manager) stop(ctx context.Context, unit string) error {
	err := m.do(ctx, unit, func(ctx context.Context, c *systemd.Conn, ch chan<- string) (int, error) {
		return c.StopUnitContext(ctx, unit, "replace", ch)
	})
	if isDBus(err, "org.freedesktop.systemd1.NoSuchUnit") {
		return nil
	}
	if err == nil { // it may have failed before, and would be kept for its state
		if conn, connErr := m.connection(); connErr == nil {
			_ = conn.ResetFailedUnitContext(ctx, unit) // fails if the unit is gone, as it should be
		}
	}
	return err
}

// set changes properties of a running unit.
func (m *manager) set(ctx context.Context, unit string, properties []systemd.Property) error {
	conn, err := m.connection()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, unitTime)
	defer cancel()
	if err := conn.SetUnitPropertiesContext(ctx, unit, true, properties...); err != nil {
		return fmt.Errorf("systemd unit %s: %w: %w", unit, err, errdefs.ErrUnavailable)
	}
	return nil
}

func isDBus(err error, name string) bool {
	var e dbus.Error
	return errors.As(err, &e) && e.Name == name
}

// isUnit reports whether a cgroup is a unit, which only systemd makes, limits and removes. Others are below one that it has
// delegated to us.
func (g Tree) isUnit(dir string) bool {
	return g.units() && slices.Contains([]string{".scope", ".service", ".slice"}, path.Ext(dir))
}

// Leaf returns the path of a cgroup for processes that we start, below a parent that is not ours: a unit where units are needed.
func (g Tree) Leaf(parent, name string) string {
	if g.units() {
		name += ".service"
	}
	return path.Join(parent, name)
}

// units reports whether cgroups are units of systemd.
func (g Tree) units() bool { return g.Driver == DriverSystemd && g.V2 }

// Helpers returns the path of the cgroup for processes that serve pods and outlive the daemon, such as the monitors of
// containers. Callers make cgroups below it. It is the default parent, or with the systemd driver a service of its own, so that
// restarts of the daemon's service do not concern the helpers. Helpers makes that service if it does not run.
func (g Tree) Helpers(ctx context.Context) (string, error) {
	if g.Driver == DriverCgroupfs {
		return g.Parent, nil
	}
	if !g.V2 {
		return ExpandSlice(path.Base(g.Parent)), nil
	}
	root := filepath.Join(g.Roots[""], helpersDir)
	// A cgroup with processes of its own cannot divide its resources, so the unit's process moves into a cgroup below. Another
	// one, without processes, says that this is done.
	hold := filepath.Join(root, "hold")
	moved := filepath.Join(hold, "moved")
	if exists(moved) {
		return helpersDir, nil
	}
	// Before= makes it end after the daemon, when the host shuts down.
	err := units.hold(ctx, helpersUnit, "tripod.slice", "Monitors, workers and sessions of Tripod's pods",
		systemd.PropBefore("tripod.service"))
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile(filepath.Join(root, "cgroup.procs")) // fails if the unit is just being stopped
	if err != nil {
		return "", fmt.Errorf("cgroup of %s: %w: %w", helpersUnit, err, errdefs.ErrUnavailable)
	}
	if err := os.MkdirAll(hold, 0o755); err != nil {
		return "", err
	}
	for pid := range strings.FieldsSeq(string(own)) {
		if err := os.WriteFile(filepath.Join(hold, "cgroup.procs"), []byte(pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return "", err
		}
	}
	if err := os.Mkdir(moved, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return helpersDir, nil
}

// hold makes a service that has a cgroup and its limits for as long as we want: its own process sleeps. A scope would end with
// the last process that we start in it, before anybody can look at what it has used, or whether it was killed for lack of memory.
func (m *manager) hold(ctx context.Context, unit, slice, description string, more ...systemd.Property) error {
	return m.start(ctx, unit, append([]systemd.Property{
		systemd.PropDescription(description), systemd.PropSlice(slice), systemd.PropExecStart([]string{"/bin/sleep", "infinity"}, false),
		property("Delegate", true), property("TasksMax", uint64(math.MaxUint64)), // systemd's own limit is a share of the host's
		property("OOMPolicy", "continue"), property("CollectMode", "inactive-or-failed"),
		property("KillMode", "process"), property("IgnoreOnIsolate", true),
		property("SuccessExitStatus", struct{ Codes, Signals []int32 }{Signals: []int32{int32(unix.SIGKILL)}}), // we kill the whole cgroup
	}, more...)...)
}

func property(name string, value any) systemd.Property {
	return systemd.Property{Name: name, Value: dbus.MakeVariant(value)}
}

// limit sets limits of a unit. It makes a slice that does not exist, also without limits: systemd would keep later limits of a
// slice that it has made for its children in files, beyond the slice.
func (m *manager) limit(dir string, writes []Write) error {
	properties, err := propertiesOf(writes)
	if err != nil {
		return err
	}
	unit := path.Base(dir)
	if strings.HasSuffix(unit, ".slice") && !exists(dir) {
		return m.start(context.Background(), unit, append(properties, systemd.PropDescription("Pod of Tripod"))...)
	}
	if len(properties) == 0 {
		return nil
	}
	return m.set(context.Background(), unit, properties)
}

// propertiesOf translates writes to files of cgroup v2 to properties of a unit (systemd.resource-control(5)).
func propertiesOf(writes []Write) (properties []systemd.Property, err error) {
	set := func(name string, value any) {
		properties = append(properties, property(name, value))
	}
	for _, w := range writes {
		switch w.File {
		case "memory.max", "memory.swap.max", "pids.max", "cpu.weight":
			value := uint64(math.MaxUint64)
			if w.Value != "max" {
				value, err = strconv.ParseUint(w.Value, 10, 64)
			}
			set(map[string]string{"memory.max": "MemoryMax", "memory.swap.max": "MemorySwapMax", "pids.max": "TasksMax",
				"cpu.weight": "CPUWeight"}[w.File], value)
		case "cpu.max":
			if w.Value == "max" {
				set("CPUQuotaPerSecUSec", uint64(math.MaxUint64))
				continue
			}
			var quota, period uint64
			if _, err = fmt.Sscan(w.Value, &quota, &period); err == nil {
				set("CPUQuotaPeriodUSec", period)
				set("CPUQuotaPerSecUSec", quota*1_000_000/period)
			}
		case "cpuset.cpus", "cpuset.mems":
			var list cpuset.CPUSet
			list, err = cpuset.Parse(w.Value)
			set(map[string]string{"cpuset.cpus": "AllowedCPUs", "cpuset.mems": "AllowedMemoryNodes"}[w.File], bitmap(list))
		default:
			err = fmt.Errorf("no property of systemd sets %s: %w", w.File, errdefs.ErrNotImplemented)
		}
		if err != nil {
			return nil, fmt.Errorf("limit %s to %q: %w", w.Controller, w.Value, err)
		}
	}
	return properties, nil
}

// bitmap returns the numbers of a set as the bits of bytes, the lowest first.
func bitmap(set cpuset.CPUSet) []byte {
	var bits big.Int
	for _, n := range set.UnsortedList() {
		bits.SetBit(&bits, n, 1)
	}
	bytes := bits.Bytes()
	slices.Reverse(bytes)
	return bytes
}

// possibleCPUs lists the CPUs that the kernel can ever have.
const possibleCPUs = "/sys/devices/system/cpu/possible"

// KeepControllers makes systemd keep the controllers of a pod's slice although no scope of ours is in it. A kubelet replaces a pod
// whose cgroup has lost one. systemd takes cpuset from a slice, when a unit ends beside it, unless the slice allows CPUs or has
// a delegated scope. The other controllers have properties that the kubelet sets. Without the systemd driver, nothing happens.
func (g Tree) KeepControllers(parent string) error {
	if !g.units() || parent == "" {
		return nil
	}
	dir, _ := g.Pod(parent, "")
	if !exists(filepath.Join(g.Roots[""], dir)) {
		return nil
	}
	text, err := os.ReadFile(possibleCPUs)
	if err != nil {
		return err
	}
	all, err := cpuset.Parse(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("%s: %w", possibleCPUs, err)
	}
	return units.set(context.Background(), path.Base(dir), []systemd.Property{property("AllowedCPUs", bitmap(all))})
}

// ownSlices returns the paths of the slices, by the IDs of their pods, that pods without a parent got from Pod with a key of this
// prefix and their ID. Without the systemd driver there are none.
func (g Tree) ownSlices(ctx context.Context, prefix string) (map[string]string, error) {
	if !g.units() {
		return nil, nil
	}
	conn, err := units.connection()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, unitTime)
	defer cancel()
	before := strings.TrimSuffix(path.Base(g.Parent), ".slice") + "-" + prefix
	loaded, err := conn.ListUnitsByPatternsContext(ctx, nil, []string{before + "*.slice"})
	if err != nil {
		return nil, fmt.Errorf("list units of systemd: %w: %w", err, errdefs.ErrUnavailable)
	}
	own := map[string]string{}
	for _, unit := range loaded {
		if id := strings.TrimSuffix(strings.TrimPrefix(unit.Name, before), ".slice"); ID().MatchString(id) {
			own[id] = ExpandSlice(unit.Name)
		}
	}
	return own, nil
}

// RemoveSlice removes a pod's slice if it is the one that Pod gives with this key to a pod without a parent. Those that callers
// name are not ours.
func (g Tree) RemoveSlice(ctx context.Context, key, slice string) error {
	if own, _ := g.Pod("", key); !g.units() || slice != own {
		return nil
	}
	return g.Remove(ctx, slice)
}

// RemoveSlices removes the slices of the pods that are not to be kept, with what runs in them.
func (g Tree) RemoveSlices(ctx context.Context, prefix string, keep map[string]bool) error {
	have, err := g.ownSlices(ctx, prefix)
	if err != nil {
		return err
	}
	var errs []error
	for id, dir := range have {
		if !keep[id] {
			errs = append(errs, g.Kill(ctx, dir), g.Remove(ctx, dir))
		}
	}
	return errors.Join(errs...)
}
