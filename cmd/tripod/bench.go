package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/cli/bench"
)

type benchSettings struct {
	socket  string
	out     string
	title   string
	pods    int
	options bench.Options
}

func (s *benchSettings) flags(c *cobra.Command, pods int) {
	f := c.Flags()
	f.StringVar(&s.socket, "socket", cli.DefaultEndpoint, "CRI socket of the runtime to measure")
	f.IntVar(&s.pods, "pods", pods, "number of pods")
	f.StringVar(&s.options.Image, "image", "docker.io/library/busybox:1", "image of the pods' containers")
	f.StringArrayVar(&s.options.Command, "command", []string{"sh", "-c", "trap 'exit 0' TERM; sleep 86400 & wait"},
		"command of the containers, one word per flag; it should end on SIGTERM; empty: the image's")
	f.StringVar(&s.options.Handler, "handler", "", "RuntimeClass handler; empty: the runtime's default")
	f.BoolVar(&s.options.HostNetwork, "host-network", false, "pods on the node's network: no CNI")
	f.StringVar(&s.options.CgroupParent, "cgroup-parent", "",
		"cgroup (cgroupfs) below which each pod gets its own parent cgroup, as from a kubelet; empty: the runtime's choice")
	f.StringToStringVar(&s.options.Annotations, "annotation", nil, "KEY=VALUE for each pod; {port} in the value becomes a port of its own")
	f.StringVar(&s.options.LogDir, "log-dir", "/var/log/pods", "where the pods' logs are written")
	f.StringVar(&s.title, "title", "", "name of the runtime in the report; empty: its own name and version")
	f.StringVar(&s.out, "json", "", "write the report to this file as JSON")
}

// measure connects to the runtime, calls the given function, and prints the report. With --json it also writes the
// report to a file.
func (s *benchSettings) measure(c *cobra.Command, do func(context.Context, *cli.Client) (*bench.Report, error)) error {
	var report *bench.Report
	err := s.connect(c, func(ctx context.Context, client *cli.Client) (err error) {
		report, err = do(ctx, client)
		return err
	})
	if err != nil {
		return err
	}
	if s.title != "" {
		report.Runtime = s.title
	}
	if err := s.write(report); err != nil {
		return err
	}
	return bench.Markdown(c.OutOrStdout(), []*bench.Report{report})
}

// connect connects to the runtime and calls the given function.
func (s *benchSettings) connect(c *cobra.Command, do func(context.Context, *cli.Client) error) error {
	if s.pods < 1 {
		return fmt.Errorf("--pods %d is not at least 1", s.pods)
	}
	if len(s.options.Command) == 1 && s.options.Command[0] == "" {
		s.options.Command = nil
	}
	ctx, stop := signal.NotifyContext(cli.Quiet(c.Context()), unix.SIGINT, unix.SIGTERM)
	defer stop()
	client, err := cli.Connect(ctx, s.socket, 5*time.Minute)
	if err != nil {
		return err
	}
	defer client.Close(context.WithoutCancel(ctx))
	return do(ctx, client)
}

// write writes a report to the file of --json.
func (s *benchSettings) write(report any) error {
	if s.out == "" {
		return nil
	}
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(s.out, append(text, '\n'), 0o644)
}

func benchCommand() *cobra.Command {
	c := &cobra.Command{Use: "bench", Short: "Measure a CRI runtime: this one or any other"}
	c.AddCommand(benchCRICommand(), benchListsCommand(), benchOverheadCommand(), benchCompareCommand())
	return c
}

func benchCRICommand() *cobra.Command {
	var s benchSettings
	var atATime []int
	c := &cobra.Command{
		Use: "cri", Short: "Measure pods' lives: percentiles of each call, pods per second, helpers' memory", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return s.measure(c, func(ctx context.Context, client *cli.Client) (*bench.Report, error) {
				return bench.Pods(ctx, client, s.options, s.pods, atATime)
			})
		},
	}
	s.flags(c, 30)
	c.Flags().IntSliceVar(&atATime, "parallel", []int{1, 10}, "numbers of concurrent pods, one round for each")
	return c
}

func benchListsCommand() *cobra.Command {
	var s benchSettings
	var repeats int
	c := &cobra.Command{
		Use: "lists", Short: "Measure list, status and stats calls on a node with many pods", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return s.measure(c, func(ctx context.Context, client *cli.Client) (*bench.Report, error) {
				return bench.Lists(ctx, client, s.options, s.pods, repeats)
			})
		},
	}
	s.flags(c, 200)
	c.Flags().IntVar(&repeats, "repeats", 50, "repetitions of each call")
	return c
}

func benchOverheadCommand() *cobra.Command {
	var s benchSettings
	var idle time.Duration
	c := &cobra.Command{
		Use: "overhead", Short: "Measure what an idle pod needs besides its containers, for a RuntimeClass", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return s.connect(c, func(ctx context.Context, client *cli.Client) error {
				overhead, err := bench.MeasureOverhead(ctx, client, s.options, s.pods, idle)
				if err == nil {
					err = s.write(overhead)
				}
				if err != nil {
					return err
				}
				return overhead.Print(c.OutOrStdout())
			})
		},
	}
	s.flags(c, 20)
	c.Flags().Int64Var(&s.options.Memory, "memory", 0,
		"memory limit of each container in bytes; for machines, the guest's memory, which does not count")
	c.Flags().DurationVar(&idle, "idle", 5*time.Second, "how long the pods are idle while their CPU time is measured")
	return c
}

func benchCompareCommand() *cobra.Command {
	return &cobra.Command{
		Use: "compare REPORT.json...", Short: "Compare reports of one run on one machine, as Markdown", Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			var reports []*bench.Report
			for _, path := range args {
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				report := &bench.Report{}
				if err := json.Unmarshal(text, report); err != nil {
					return fmt.Errorf("%s: %w", path, err)
				}
				reports = append(reports, report)
			}
			return bench.Markdown(c.OutOrStdout(), reports)
		},
	}
}
