package e2e

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// equalRow is a container that must be the same under the handlers linux and vm-oci.
type equalRow struct {
	name   string
	script string // for sh -c; the image's or the options' command if empty
	// code and want are the exit code and a part of what is compared under linux, so that two containers that fail in the same
	// way are no success.
	code    int32
	want    string
	image   string // Busybox if empty
	options []harness.ContainerOption
	// act does something with the started container. Its result is compared, too. The container is stopped after it.
	act func(*equalRun) string
}

// equalRun is the run of a row under one handler.
type equalRun struct {
	*harness.Container
	t   *testing.T
	d   *harness.Daemon
	dir string // the pod's volumes, see makeVolumes
}

// differences are the fields that differ by nature, as ROW/FIELD, with the reason. The rows print nothing that depends on the
// kernel, the cgroup version, the CPUs or the node's own limits, capabilities and ignored signals. A directory's number of
// links depends on the file system. A guest without a host name from the CRI has the pod's name, because it does not know the
// node's.
var differences = map[string]string{
	"device in a volume/stderr": noDevices, "device in a volume/stdout": noDevices,
}

const noDevices = "a guest must not make devices of the node"

// TestVMOCIEqual runs the same containers under the handlers linux and vm-oci, in one pod per handler and group, and
// compares what a kubelet, a user and the containers themselves see.
func TestVMOCIEqual(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	for _, image := range []string{harness.Busybox, harness.Config, harness.Layers, harness.NoNewPrivs, harness.StopSignal} {
		d.Pull(t, image)
	}
	for _, g := range []struct {
		name string
		pod  harness.PodOption
		rows []equalRow
	}{
		{"processes", ordinaryPod, slices.Concat(processRows, userRows, securityRows, endRows)},
		{"files", privilegedPod, slices.Concat(outputRows, fileRows, volumeRows, privilegedRows)},
	} {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			results := map[string][]map[string]string{}
			for _, handler := range []string{"linux", harness.OCIHandler} {
				began := time.Now()
				p := d.RunPodWith(t, harness.PodConfig(t, "equal", g.pod), handler)
				dir := makeVolumes(t)
				for _, row := range g.rows {
					results[handler] = append(results[handler], row.run(t, d, p, dir))
				}
				p.Remove()
				t.Logf("%d containers under %s: %s", len(g.rows), handler, time.Since(began).Round(time.Second))
			}
			for i, row := range g.rows {
				row.compare(t, results["linux"][i], results[harness.OCIHandler][i])
			}
		})
	}
}

// run runs the row's container and returns what is to be compared.
func (r equalRow) run(t *testing.T, d *harness.Daemon, p *harness.Pod, dir string) map[string]string {
	t.Helper()
	config := harness.ContainerConfig(strings.ReplaceAll(r.name, " ", "-"), harness.Busybox, r.options...)
	if r.image != "" {
		config.Image.Image = r.image
	}
	if r.script != "" {
		config.Command = []string{"sh", "-c", r.script}
	}
	for i, m := range config.Mounts {
		config.Mounts[i] = proto.CloneOf(m) // the rows are run twice
		config.Mounts[i].HostPath = filepath.Join(dir, m.HostPath)
	}
	id, err := create(d, p, config)
	if err != nil {
		return map[string]string{"refused": answered(err)}
	}
	c := &equalRun{Container: &harness.Container{ID: id, Config: config, Pod: p}, t: t, d: d, dir: dir}
	defer c.Remove()
	got := map[string]string{}
	if _, err := d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id}); err != nil {
		got["start"] = answered(err)
	} else if r.act != nil {
		got["act"] = r.act(c)
		if strings.HasSuffix(r.script, idle) {
			c.WaitLog(idles)
		}
		c.Stop(10 * time.Second)
	}
	until.Within(t, harness.GuestTimeout, "container "+config.Metadata.Name+" ends", func() bool {
		return c.Status().State == runtimeapi.ContainerState_CONTAINER_EXITED
	})
	s, log := c.Status(), c.Logs()
	maps.Copy(got, map[string]string{
		"stdout": harness.Text(log, "stdout"), "stderr": harness.Text(log, "stderr"),
		"code": fmt.Sprint(s.ExitCode), "reason": s.Reason, "message": s.Message,
		"image": s.GetImage().String(), "image ref": s.ImageRef, "image ID": s.ImageId, "user": s.GetUser().String(),
		"mounts": fmt.Sprint(s.Mounts), "resources": s.GetResources().String(), "stop signal": s.StopSignal.String(),
		"times": fmt.Sprint(0 < s.CreatedAt && s.CreatedAt <= s.StartedAt && s.StartedAt <= s.FinishedAt),
	})
	same := strings.NewReplacer(id, "CONTAINER", p.ID, "POD", dir, "VOLUMES", p.IP(), "ADDRESS")
	for field, value := range got {
		got[field] = same.Replace(value)
	}
	return got
}

// answered returns the code and the message of an error. That a guest has sent the message is said only by machines.
func answered(err error) string {
	return status.Code(err).String() + ": " + strings.Replace(status.Convert(err).Message(), "the guest's agent: ", "", 1)
}

// compare reports the fields that are not equal, and the listed differences that are.
func (r equalRow) compare(t *testing.T, linux, machine map[string]string) {
	t.Helper()
	if code := fmt.Sprint(r.code); linux["refused"] == "" && linux["code"] != code {
		t.Errorf("%s: exit code %s, want %s; %q", r.name, linux["code"], code, linux)
	}
	if !strings.Contains(linux["stdout"]+linux["act"]+linux["start"]+linux["refused"]+linux["reason"], r.want) {
		t.Errorf("%s: no %q in %q", r.name, r.want, linux)
	}
	fields := maps.Clone(linux)
	maps.Copy(fields, machine)
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		reason, listed := differences[r.name+"/"+field]
		switch equal := linux[field] == machine[field]; {
		case equal && listed:
			t.Errorf("%s: %s is equal, but listed as different because %s", r.name, field, reason)
		case !equal && !listed:
			t.Errorf("%s: %s differs\n--- linux\n%s\n--- vm-oci\n%s", r.name, field, excerpt(linux[field], machine[field]),
				excerpt(machine[field], linux[field]))
		}
	}
}

// excerpt returns the lines of a text that the other does not have.
func excerpt(text, other string) string {
	const most = 20
	have := map[string]bool{}
	for line := range strings.Lines(other) {
		have[line] = true
	}
	var b strings.Builder
	n := 0
	for line := range strings.Lines(text) {
		if have[line] {
			continue
		}
		if n++; n > most {
			return b.String() + "...\n"
		}
		fmt.Fprintf(&b, "%.400q\n", line)
	}
	return b.String()
}

func ordinaryPod(c *runtimeapi.PodSandboxConfig) {
	c.Hostname = "equal-host"
	c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"192.0.2.53"}, Searches: []string{"a.test", "b.test"}, Options: []string{"ndots:3"}}
	c.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1", "net.ipv4.ip_local_port_range": "20000 30000"}
}

// privilegedPod can have containers that are privileged and that share their processes.
func privilegedPod(c *runtimeapi.PodSandboxConfig) {
	c.Hostname = "equal-host"
	c.Linux.SecurityContext.Privileged, c.Linux.SecurityContext.NamespaceOptions.Pid = true, runtimeapi.NamespaceMode_POD
}

// idle runs until SIGTERM, which has an effect once it has printed idles.
const (
	idle  = "trap 'exit 0' TERM; echo " + idles + "; sleep 3600 & wait"
	idles = "idles"
)

func options(o ...harness.ContainerOption) []harness.ContainerOption { return o }

// secured returns the options of a container with a security context.
func secured(change func(*security)) []harness.ContainerOption {
	return options(harness.Security(change))
}

// volume mounts a path of makeVolumes.
func volume(source, at string) harness.ContainerOption {
	return mounts(&runtimeapi.Mount{HostPath: source, ContainerPath: at})
}

func readonly(source, at string) harness.ContainerOption {
	return mounts(&runtimeapi.Mount{HostPath: source, ContainerPath: at, Readonly: true})
}
