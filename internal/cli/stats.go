package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (a *App) statsCommand() *cobra.Command {
	var pods bool
	var interval time.Duration
	c := &cobra.Command{
		Use: "stats [ID]", Short: "Show the resource use of containers (with --pods: of pods)", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				if pods {
					return a.podStats(ctx, client, args, interval)
				}
				return a.containerStats(ctx, client, args, interval)
			})
		},
	}
	c.Flags().BoolVar(&pods, "pods", false, "pods instead of containers")
	c.Flags().DurationVar(&interval, "interval", time.Second, "measuring interval for CPU use, for runtimes that report no rate")
	a.formatFlags(c, "")
	return c
}

func (a *App) containerStats(ctx context.Context, client *Client, args []string, interval time.Duration) error {
	filter := &runtimeapi.ContainerStatsFilter{}
	if len(args) == 1 {
		id, err := client.Container(ctx, args[0])
		if err != nil {
			return err
		}
		filter.Id = id
	}
	list := func() ([]*runtimeapi.ContainerStats, error) { return client.ListContainerStats(ctx, filter) }
	all, err := list()
	if err != nil {
		return err
	}
	return a.Print(&runtimeapi.ListContainerStatsResponse{Stats: all}, func(bool) error {
		rates, err := measure(ctx, all, list, interval,
			func(s *runtimeapi.ContainerStats) (string, *runtimeapi.CpuUsage) {
				return s.GetAttributes().GetId(), s.GetCpu()
			})
		if err != nil {
			return err
		}
		slices.SortFunc(all, func(x, y *runtimeapi.ContainerStats) int {
			return strings.Compare(x.GetAttributes().GetMetadata().GetName(), y.GetAttributes().GetMetadata().GetName())
		})
		t := newTable(a.Stdout, "CONTAINER", "NAME", "CPU %", "MEM", "DISK", "INODES", "SWAP")
		for _, s := range all {
			t.row(shortID(s.GetAttributes().GetId()), s.GetAttributes().GetMetadata().GetName(), percent(rates, s.GetAttributes().GetId()),
				size(s.GetMemory().GetWorkingSetBytes().GetValue()), size(s.GetWritableLayer().GetUsedBytes().GetValue()),
				fmt.Sprint(s.GetWritableLayer().GetInodesUsed().GetValue()), size(s.GetSwap().GetSwapUsageBytes().GetValue()))
		}
		return t.flush()
	})
}

func (a *App) podStats(ctx context.Context, client *Client, args []string, interval time.Duration) error {
	filter := &runtimeapi.PodSandboxStatsFilter{}
	if len(args) == 1 {
		id, err := client.Pod(ctx, args[0])
		if err != nil {
			return err
		}
		filter.Id = id
	}
	list := func() ([]*runtimeapi.PodSandboxStats, error) { return client.ListPodSandboxStats(ctx, filter) }
	all, err := list()
	if err != nil {
		return err
	}
	return a.Print(&runtimeapi.ListPodSandboxStatsResponse{Stats: all}, func(bool) error {
		rates, err := measure(ctx, all, list, interval,
			func(s *runtimeapi.PodSandboxStats) (string, *runtimeapi.CpuUsage) {
				return s.GetAttributes().GetId(), s.GetLinux().GetCpu()
			})
		if err != nil {
			return err
		}
		t := newTable(a.Stdout, "POD", "NAME", "CPU %", "MEM", "PROCESSES", "RX", "TX")
		for _, s := range all {
			l := s.GetLinux()
			eth := l.GetNetwork().GetDefaultInterface()
			t.row(shortID(s.GetAttributes().GetId()), s.GetAttributes().GetMetadata().GetName(), percent(rates, s.GetAttributes().GetId()),
				size(l.GetMemory().GetWorkingSetBytes().GetValue()), fmt.Sprint(l.GetProcess().GetProcessCount().GetValue()),
				size(eth.GetRxBytes().GetValue()), size(eth.GetTxBytes().GetValue()))
		}
		return t.flush()
	})
}

// measure returns the CPU use by ID in nanoseconds per second: the runtime's own rate if it reports one, otherwise the
// difference between two samples.
func measure[S any](ctx context.Context, first []S, again func() ([]S, error), interval time.Duration,
	cpu func(S) (string, *runtimeapi.CpuUsage)) (map[string]float64, error) {
	rates, before := map[string]float64{}, map[string]*runtimeapi.CpuUsage{}
	for _, s := range first {
		id, use := cpu(s)
		if use.GetUsageNanoCores() != nil {
			rates[id] = float64(use.GetUsageNanoCores().GetValue())
		} else {
			before[id] = use
		}
	}
	if len(before) == 0 {
		return rates, nil
	}
	select {
	case <-time.After(interval):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	second, err := again()
	if err != nil {
		return nil, err
	}
	for _, s := range second {
		id, use := cpu(s)
		was, ok := before[id]
		if elapsed := use.GetTimestamp() - was.GetTimestamp(); ok && elapsed > 0 {
			used := float64(use.GetUsageCoreNanoSeconds().GetValue()) - float64(was.GetUsageCoreNanoSeconds().GetValue())
			rates[id] = max(used, 0) / float64(elapsed) * 1e9
		}
	}
	return rates, nil
}

func percent(rates map[string]float64, id string) string {
	if rate, ok := rates[id]; ok {
		return fmt.Sprintf("%.2f", rate/1e7)
	}
	return "-"
}
