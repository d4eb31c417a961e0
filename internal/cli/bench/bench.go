package bench

import (
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
)

// Round is the result of running a number of pods, Parallel at a time.
type Round struct {
	Parallel int      `json:"parallel"`
	Pods     int      `json:"pods"`
	Figures  []Figure `json:"figures"`
	// PodsPerSecond covers the up phase only.
	PodsPerSecond float64 `json:"pods_per_second"`
	Memory        Memory  `json:"memory"`
}

// Report is the result of one run of `bench cri` or `bench lists`.
type Report struct {
	Runtime  string    `json:"runtime"`
	Endpoint string    `json:"endpoint"`
	Date     time.Time `json:"date"`
	Image    string    `json:"image"`
	Network  string    `json:"network"`
	Rounds   []Round   `json:"rounds,omitempty"`
	// Lists are the figures that were measured on a node with ListPods pods.
	Lists    []Figure `json:"lists,omitempty"`
	ListPods int      `json:"list_pods,omitempty"`
	// ListUp is the time, in seconds, until all of those pods ran, ten at a time. ListDaemons is the PSS of the daemons
	// after the lists, in bytes.
	ListUp      float64 `json:"list_up_s,omitempty"`
	ListDaemons int64   `json:"list_daemons_bytes,omitempty"`
}

func newReport(ctx context.Context, d *driver) (*Report, error) {
	version, err := d.client.Version(ctx, "v1")
	if err != nil {
		return nil, err
	}
	r := &Report{Runtime: version.GetRuntimeName() + " " + version.GetRuntimeVersion(), Endpoint: d.client.Endpoint,
		Date: time.Now().UTC().Truncate(time.Second), Image: d.o.Image, Network: "CNI"}
	if d.o.HostNetwork {
		r.Network = "host"
	}
	return r, nil
}

// Pods measures how long pods take to start and end. After one pod to warm up, it runs one round for each number of
// parallel pods in atATime.
func Pods(ctx context.Context, client *cli.Client, o Options, pods int, atATime []int) (_ *Report, err error) {
	d := newDriver(client, o)
	report, err := newReport(ctx, d)
	if err != nil {
		return nil, err
	}
	if err := d.ensureImage(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.sweep(ctx)) }()
	if _, err := d.round(ctx, 1, 1); err != nil {
		return nil, err
	}
	for _, n := range atATime {
		round, err := d.round(ctx, pods, n)
		if err != nil {
			return nil, fmt.Errorf("%d at a time: %w", n, err)
		}
		report.Rounds = append(report.Rounds, *round)
	}
	return report, nil
}

// round starts all pods, measures memory, and removes them.
func (d *driver) round(ctx context.Context, pods, atATime int) (*Round, error) {
	before, err := processes("/proc")
	if err != nil {
		return nil, err
	}
	daemonsBefore, err := DaemonsPSS("/proc")
	if err != nil {
		return nil, err
	}
	round, r, all := &Round{Parallel: atATime, Pods: pods}, newRecorder(), make([]*pod, pods)
	started := time.Now()
	err = parallel(ctx, atATime, pods, func(i int) (err error) {
		all[i], err = d.startPod(ctx, r)
		return err
	})
	if err != nil {
		return nil, err
	}
	round.PodsPerSecond = float64(pods) / time.Since(started).Seconds()
	if round.Memory, err = helpers("/proc", before, pods); err != nil {
		return nil, err
	}
	daemonsNow, err := DaemonsPSS("/proc")
	if err != nil {
		return nil, err
	}
	round.Memory.DaemonGrowth = (daemonsNow - daemonsBefore) / int64(pods)
	err = parallel(ctx, atATime, pods, func(i int) error { return d.removePod(ctx, r, all[i]) })
	if err != nil {
		return nil, err
	}
	round.Figures = r.figures()
	return round, nil
}

// Lists measures the calls that a kubelet makes constantly, on a node with the given number of pods.
func Lists(ctx context.Context, client *cli.Client, o Options, pods, repeats int) (_ *Report, err error) {
	d := newDriver(client, o)
	report, err := newReport(ctx, d)
	if err != nil {
		return nil, err
	}
	if err := d.ensureImage(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.sweep(ctx)) }()
	all, discard, started := make([]*pod, pods), newRecorder(), time.Now()
	err = parallel(ctx, 10, pods, func(i int) (err error) {
		all[i], err = d.startPod(ctx, discard)
		return err
	})
	if err != nil {
		return nil, err
	}
	report.ListUp = time.Since(started).Seconds()
	r := newRecorder()
	for i := range repeats {
		if err := d.lists(ctx, r, all[i%pods], pods); err != nil {
			return nil, err
		}
	}
	report.Lists, report.ListPods = r.figures(), pods
	report.ListDaemons, err = DaemonsPSS("/proc")
	return report, err
}

// A list call is not repeated any more once it has taken listTime in total and has been made listLeast times.
const (
	listTime  = 10 * time.Second
	listLeast = 5
)

// lists makes each call once, except list calls that need no further repetition, and checks that the answers are
// complete. To decode a long list takes a client longer than any runtime needs to answer, so both lists are timed without
// decoding as well.
func (d *driver) lists(ctx context.Context, r *recorder, p *pod, pods int) error {
	timeList := func(call string, list func() (int, error)) error {
		if r.count(call) >= listLeast && r.total(call) > listTime {
			return nil
		}
		n := 0
		err := r.time(call, func() (err error) { n, err = list(); return err })
		if err == nil && n < pods {
			err = fmt.Errorf("the answer has %d of %d items", n, pods)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", call, err)
		}
		return nil
	}
	undecoded := func(method string, request proto.Message) error {
		return r.time(path.Base(method)+", undecoded", func() error {
			size, err := d.client.AnswerSize(ctx, method, request)
			if err == nil && size < pods*len(p.id) {
				err = fmt.Errorf("%s: the answer has %d bytes, too few for %d items", method, size, pods)
			}
			return err
		})
	}
	return errors.Join(
		undecoded(runtimeapi.RuntimeService_ListPodSandbox_FullMethodName, &runtimeapi.ListPodSandboxRequest{}),
		undecoded(runtimeapi.RuntimeService_ListContainers_FullMethodName, &runtimeapi.ListContainersRequest{}),
		timeList("ListPodSandbox", func() (int, error) {
			all, err := d.client.ListPodSandbox(ctx, nil)
			return len(all), err
		}),
		timeList("ListContainers", func() (int, error) {
			all, err := d.client.ListContainers(ctx, nil)
			return len(all), err
		}),
		r.time("PodSandboxStatus", func() error {
			_, err := d.client.PodSandboxStatus(ctx, p.id, false)
			return err
		}),
		r.time("ContainerStatus", func() error {
			_, err := d.client.ContainerStatus(ctx, p.container, false)
			return err
		}),
		r.time("ListContainers of a pod", func() error {
			_, err := d.client.ListContainers(ctx, &runtimeapi.ContainerFilter{PodSandboxId: p.id})
			return err
		}),
		r.time("Status", func() error {
			_, err := d.client.Status(ctx, false)
			return err
		}),
		timeList("ListContainerStats", func() (int, error) {
			all, err := d.client.ListContainerStats(ctx, nil)
			return len(all), err
		}),
		timeList("ListPodSandboxStats", func() (int, error) {
			all, err := d.client.ListPodSandboxStats(ctx, nil)
			return len(all), err
		}),
	)
}
