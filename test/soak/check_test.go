package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// settleTime limits how long the daemon can take after the last call to notice all events and to complete abandoned
// calls. An SPDY session lives 30 s if its client disconnects before it opens streams.
const settleTime = 45 * time.Second

// check compares the daemon's answers with the machine. No other client makes calls meanwhile.
func (s *soak) check() {
	harness.Eventually(s.t, settleTime, func() error {
		list, err := s.cri.ListContainers(s.t.Context(), &runtimeapi.ListContainersRequest{})
		if err != nil {
			return err
		}
		pods, err := s.cri.ListPodSandbox(s.t.Context(), &runtimeapi.ListPodSandboxRequest{})
		if err != nil {
			return err
		}
		return errors.Join(s.checkProcesses(list.Containers, pods.Items), s.checkStatuses(list.Containers), s.checkAddresses(pods.Items))
	})
	for _, u := range s.units {
		u.check()
	}
	for _, w := range s.workers {
		for _, c := range w.own.containers {
			w.expect(c, c.state)
			s.checkEnd(c)
			if s.linux {
				s.checkLog(c)
			}
		}
	}
	s.quickLists()
}

// checkProcesses checks that exactly the cgroups of running containers and ready pods contain processes.
func (s *soak) checkProcesses(containers []*runtimeapi.Container, pods []*runtimeapi.PodSandbox) error {
	if !s.linux {
		return nil
	}
	at := processesByID()
	var errs []error
	units := map[string]bool{} // run in shared workers
	for _, p := range pods {
		units[p.Id] = p.RuntimeHandler == handler
	}
	for _, c := range containers {
		if units[c.PodSandboxId] {
			continue
		}
		if n := at[c.Id]; (n > 0) != (c.State == running) {
			errs = append(errs, fmt.Errorf("container %s %s: got state %s and %d processes, want processes only if it runs", c.Metadata.Name, c.Id,
				c.State, n))
		}
		delete(at, c.Id)
	}
	for _, p := range pods {
		if at[p.Id] > 0 && p.State != runtimeapi.PodSandboxState_SANDBOX_READY {
			errs = append(errs, fmt.Errorf("pod %s %s: got state %s and %d processes, want none", p.Metadata.Name, p.Id, p.State, at[p.Id]))
		}
		delete(at, p.Id)
	}
	for id, n := range at {
		errs = append(errs, fmt.Errorf("cgroup of %s, which the daemon does not list: got %d processes, want none", id, n))
	}
	return errors.Join(errs...)
}

// checkStatuses checks that times are set and in order, and that exited containers have a reason.
func (s *soak) checkStatuses(containers []*runtimeapi.Container) error {
	var errs []error
	for _, c := range containers {
		resp, err := s.cri.ContainerStatus(s.t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		st := resp.Status
		good := st.State == c.State && st.CreatedAt > 0
		switch st.State {
		case created:
			good = good && st.StartedAt == 0 && st.FinishedAt == 0
		case running:
			good = good && st.StartedAt >= st.CreatedAt && st.FinishedAt == 0 && st.ExitCode == 0 && st.Reason == ""
		case exited:
			good = good && st.StartedAt >= st.CreatedAt && st.FinishedAt >= st.StartedAt && (st.Reason == "Completed") == (st.ExitCode == 0) &&
				st.Reason != ""
		default:
			good = false
		}
		if !good {
			errs = append(errs, fmt.Errorf("status of container %s, listed as %s: got %v, want consistent fields", c.Metadata.Name, c.State, st))
		}
	}
	return errors.Join(errs...)
}

// checkAddresses checks that each ready pod has its own address, which accepts or refuses connections.
func (s *soak) checkAddresses(pods []*runtimeapi.PodSandbox) error {
	var errs []error
	owner := map[string]string{}
	for _, p := range pods {
		resp, err := s.cri.PodSandboxStatus(s.t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.Id})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		network := resp.Status.GetLinux().GetNamespaces().GetOptions().GetNetwork()
		if resp.Status.State != runtimeapi.PodSandboxState_SANDBOX_READY || network == runtimeapi.NamespaceMode_NODE {
			continue
		}
		ip := resp.Status.GetNetwork().GetIp()
		if other := owner[ip]; other != "" || ip == "" {
			errs = append(errs, fmt.Errorf("address of pod %s: got %q, want one that no other pod has (%q does)", p.Id, ip, other))
		}
		owner[ip] = p.Id
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(ip, "9"), 5*time.Second)
		if err == nil {
			conn.Close()
		} else if !errors.Is(err, syscall.ECONNREFUSED) {
			errs = append(errs, fmt.Errorf("connect to pod %s: got %w, want a connection or a refusal", p.Id, err))
		}
	}
	return errors.Join(errs...)
}

// checkEnd checks that a container that was neither stopped nor harmed has the exit code and reason of its program.
func (s *soak) checkEnd(c *container) {
	if c.state != exited || c.ordered || s.isHarmed(c.id, c.pod.id) {
		return
	}
	want := map[string]string{"short": "3 Error", "burst": "0 Completed", "orphans": "0 Completed"}
	if s.linux {
		want["oom"], want["missing"] = "137 OOMKilled", "128 StartError"
	}
	resp, err := s.cri.ContainerStatus(s.t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.id})
	if err != nil {
		s.t.Error(err)
		return
	}
	if got := fmt.Sprintf("%d %s", resp.Status.ExitCode, resp.Status.Reason); want[c.kind] != "" && got != want[c.kind] {
		s.t.Errorf("end of container %s (%s): got %s (%s), want %s", c.id, c.kind, got, resp.Status.Message, want[c.kind])
	}
}

// checkLog checks that each start counts its lines from 1, and that no line is missing, torn or duplicated over all
// rotations.
func (s *soak) checkLog(c *container) {
	if s.isHarmed(c.id, c.pod.id) {
		return
	}
	var all strings.Builder
	for i := range c.rotations + 1 {
		name := c.log
		if i < c.rotations {
			name = fmt.Sprintf("%s.%d", c.log, i+1)
		}
		text, err := os.ReadFile(name)
		if err != nil && !os.IsNotExist(err) {
			s.t.Error(err)
		}
		if c.state == running { // the last line may be incomplete
			text = text[:strings.LastIndexByte(string(text), '\n')+1]
		}
		all.Write(text)
	}
	lines, err := harness.ParseLog(all.String())
	if err != nil {
		s.t.Errorf("log of %s (%s): %v", c.id, c.kind, err)
		return
	}
	n := 0
	for line := range strings.Lines(harness.Text(lines, "stdout")) {
		got, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(line, "line "), "\n"))
		if err != nil || got != n+1 && got != 1 {
			s.t.Errorf("log of %s (%s): got %q after line %d, want line %d or 1", c.id, c.kind, line, n, n+1)
			return
		}
		n = got
	}
	if c.lines > 0 && c.state == exited && !c.ordered && n != c.lines {
		s.t.Errorf("last line in the log of %s (%s): got %d, want %d", c.id, c.kind, n, c.lines)
	}
}

// quickLists checks that without load, the call that a kubelet makes every second is fast.
func (s *soak) quickLists() {
	var times []time.Duration
	for range 20 {
		began := time.Now()
		if _, err := s.cri.ListContainers(s.t.Context(), &runtimeapi.ListContainersRequest{}); err != nil {
			s.t.Error(err)
		}
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	if median := times[len(times)/2]; median > 50*time.Millisecond {
		s.t.Errorf("median duration of ListContainers: got %v, want at most 50ms", median)
	}
}

// removeAll removes all pods and the image that workers pull and remove, and checks that nothing is left.
func (s *soak) removeAll() {
	if err := s.d.RemoveAllPods(); err != nil && !s.injected(err) {
		s.t.Errorf("remove all pods: %v", err)
	} else if err != nil {
		harness.Eventually(s.t, settleTime, s.d.RemoveAllPods)
	}
	for _, w := range s.workers {
		s.renew(w.own, s.rng)
	}
	for _, p := range s.shared {
		s.renew(p, s.rng)
	}
	for _, u := range s.units {
		u.begin()
	}
	remove := &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Config}}
	harness.Eventually(s.t, settleTime, func() error { _, err := s.img.RemoveImage(s.t.Context(), remove); return err })
	if s.d.Pid() != s.basePid {
		s.base.Files = nil
	}
	harness.Eventually(s.t, settleTime, func() error {
		var more error
		if n := s.countGoroutines(); s.d.Pid() == s.basePid && n > s.goroutines+20 {
			more = fmt.Errorf("goroutines of the daemon: got %d, want at most %d", n, s.goroutines+20)
		}
		if kib := s.residentKiB(); s.d.Pid() == s.basePid && kib > s.resident+moreKiB {
			more = errors.Join(more, fmt.Errorf("memory of the daemon: got %d KiB, want at most %d", kib, s.resident+moreKiB))
		}
		now := s.snapshot()
		return errors.Join(more, s.workerGrowth(), s.base.Leaks(now), s.first.Leaks(now))
	})
	s.checkRecordSize()
	s.useComponents()
	s.takeBase()
}

// settled is the number of times that all pods are removed before the record files reach their final size.
const settled = 3

// checkRecordSize checks that the record files do not grow with the number of removed pods.
func (s *soak) checkRecordSize() {
	s.t.Helper()
	s.empty++
	files := map[string]int64{}
	if err := filepath.WalkDir(s.d.Root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".db") {
			return nil // a file that was removed meanwhile is not a record
		}
		info, err := e.Info()
		if err == nil {
			files[path] = info.Size()
		}
		return err
	}); err != nil {
		s.t.Error(err)
	}
	if s.empty == settled {
		s.records = files
	}
	for path, size := range files {
		// bbolt doubles the size of a full file.
		if had, ok := s.records[path]; ok && size > 2*had+1<<20 {
			s.t.Errorf("size of %s: got %d bytes, want at most %d", path, size, 2*had+1<<20)
		}
	}
}

// takeBase records the resources without pods.
func (s *soak) takeBase() {
	s.base, s.basePid, s.goroutines, s.resident = s.snapshot(), s.d.Pid(), s.countGoroutines(), s.residentKiB()
	// The daemon has one more descriptor of a component worker and of a session carrier that it has started itself, to
	// wait for the process.
	s.base.Files["anon_inode:[pidfd]"] += 2
}

// moreKiB is the allowed growth of the daemon's memory between two moments without pods, because Go returns memory
// late.
const moreKiB = 96 << 10

// residentKiB returns the daemon's resident memory.
func (s *soak) residentKiB() int {
	u, ok := usageOf(s.d.Pid())
	if !ok {
		s.t.Error("read the daemon's memory: the daemon has exited")
	}
	return u.residentKiB
}

// countGoroutines returns the number of the daemon's goroutines, according to its profile.
func (s *soak) countGoroutines() int {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.debug)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get("http://daemon/debug/pprof/goroutine?debug=1")
	if err != nil {
		s.t.Errorf("get the daemon's profile: %v", err)
		return 0
	}
	defer resp.Body.Close()
	var n int
	if _, err := fmt.Fscanf(resp.Body, "goroutine profile: total %d", &n); err != nil {
		s.t.Errorf("parse the daemon's profile: %v", err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return n
}

// helper is a process without which a container or a pod ends.
type helper struct {
	pid     int
	id      string
	monitor bool
}

var (
	cgroupID  = regexp.MustCompile(`/tripod-([0-9a-f]{64})$`)
	monitorID = regexp.MustCompile(`conmon\x00.*--cid\x00([0-9a-f]{64})\x00.*--full-attach`)
)

// helperProcesses finds the monitors of containers and the init processes of pods.
func helperProcesses() []helper {
	var found []helper
	eachProcess(func(pid int, cmdline, cgroup string) {
		if m := monitorID.FindStringSubmatch(cmdline); m != nil {
			found = append(found, helper{pid: pid, id: m[1], monitor: true})
		} else if strings.HasSuffix(cmdline, "\x00-P\x00") && cgroup != "" {
			found = append(found, helper{pid: pid, id: cgroup})
		}
	})
	return found
}

// processesByID counts the processes in the cgroups of pods and containers.
func processesByID() map[string]int {
	found := map[string]int{}
	eachProcess(func(_ int, _, cgroup string) {
		if cgroup != "" {
			found[cgroup]++
		}
	})
	return found
}

// eachProcess calls visit with each live process, its command line, and the ID of the pod or container whose cgroup it
// is in.
func eachProcess(visit func(pid int, cmdline, cgroup string)) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		cmdline, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		cgroups, err := os.ReadFile("/proc/" + e.Name() + "/cgroup")
		if err != nil || len(cmdline) == 0 { // the process has ended
			continue
		}
		var id string
		for line := range strings.Lines(string(cgroups)) {
			if m := cgroupID.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
				id = m[1]
			}
		}
		visit(pid, string(cmdline), id)
	}
}
