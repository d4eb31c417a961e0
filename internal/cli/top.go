package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/duration"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stats"
)

func (a *App) topCommand() *cobra.Command {
	var interval time.Duration
	var once bool
	var order string
	c := &cobra.Command{
		Use: "top", Short: "Watch what all pods use: CPU, memory, network, requests", Args: cobra.NoArgs,
		Long: `Top shows all pods of all kinds in a table that it refreshes. Keys: c, m, r, t, n, k, s and a sort by CPU, memory,
requests, traffic, name, runtime, state and age; the same key again reverses the order. Arrows scroll, q quits.

REQ/S counts requests that the node serves itself, to WebAssembly components.`,
		RunE: func(c *cobra.Command, _ []string) error {
			sorting, ok := orderNamed(order)
			if !ok {
				return fmt.Errorf("--sort %q is not one of %s", order, strings.Join(orderNames(), ", "))
			}
			if interval < 100*time.Millisecond {
				return fmt.Errorf("--interval %v is less than 100ms", interval)
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				s := &sampler{client: client}
				if once {
					return a.topOnce(ctx, s, interval, sorting)
				}
				return a.topView(ctx, s, interval, sorting)
			})
		},
	}
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two measurements")
	c.Flags().BoolVar(&once, "once", false, "print one table and exit")
	c.Flags().StringVar(&order, "sort", "cpu", "column to sort by: "+strings.Join(orderNames(), ", "))
	return c
}

// topOnce measures twice and prints one table.
func (a *App) topOnce(ctx context.Context, s *sampler, interval time.Duration, by order) error {
	if _, err := s.sample(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(interval):
	case <-ctx.Done():
		return ctx.Err()
	}
	loads, err := s.sample(ctx)
	if err != nil {
		return err
	}
	_, err = a.Stdout.Write(renderLoads(by.sorted(loads, false), time.Now()))
	return err
}

// load is what one pod uses. Rates are per second, and negative if they are not known.
type load struct {
	name, namespace, runtime string
	ready                    bool
	created                  time.Time
	cores                    float64 // processors in use
	memory                   uint64  // working set in bytes
	requests                 float64
	traffic                  float64 // bytes received and sent
}

// counters are the totals of one pod from which its rates follow.
type counters struct {
	at                     time.Time
	cpu, requests, traffic float64
	hasCPU, hasRequests    bool
}

// sampler measures all pods. Rates are those since the sample before.
type sampler struct {
	client *Client
	last   map[string]counters
	// quiet is the number of samples for which requests are not asked for, because there are none.
	quiet int
}

// askAgain is the number of samples after which the node is asked for requests again.
const askAgain = 4

func (s *sampler) sample(ctx context.Context) ([]load, error) {
	pods, err := s.client.ListPodSandbox(ctx, nil)
	if err != nil {
		return nil, err
	}
	figures, err := s.client.ListPodSandboxStats(ctx, nil)
	if err != nil {
		return nil, err
	}
	requests, err := s.requests(ctx, pods)
	if err != nil {
		return nil, err
	}
	loads, next := newLoads(pods, figures, requests, s.last, time.Now())
	s.last = next
	return loads, nil
}

// requests returns the number of requests by pod. The metrics of all pods are long, so it seldom asks a node that has
// served none. Other runtimes may lack the call.
func (s *sampler) requests(ctx context.Context, pods []*runtimeapi.PodSandbox) (map[string]float64, error) {
	if s.quiet > 0 {
		s.quiet--
		return nil, nil
	}
	metrics, err := s.client.ListPodSandboxMetrics(ctx)
	if err != nil && status.Code(err) != codes.Unimplemented {
		return nil, err
	}
	totals := requestTotals(metrics, pods)
	if len(totals) == 0 {
		s.quiet = askAgain
	}
	return totals, nil
}

// newLoads joins the lists of one sample. It returns the loads and the counters for the next sample.
func newLoads(pods []*runtimeapi.PodSandbox, all []*runtimeapi.PodSandboxStats, requests map[string]float64, last map[string]counters,
	now time.Time) ([]load, map[string]counters) {
	byID := make(map[string]*runtimeapi.LinuxPodSandboxStats, len(all))
	for _, s := range all {
		byID[s.GetAttributes().GetId()] = s.GetLinux()
	}
	next := make(map[string]counters, len(pods))
	var loads []load
	for _, p := range pods {
		l := load{name: p.GetMetadata().GetName(), namespace: p.GetMetadata().GetNamespace(), runtime: cmp.Or(p.GetRuntimeHandler(), "(default)"),
			ready: p.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY, created: time.Unix(0, p.GetCreatedAt()), cores: -1, requests: -1,
			traffic: -1}
		if figures := byID[p.GetId()]; figures != nil {
			c := totals(figures, now)
			c.requests, c.hasRequests = requests[p.GetId()]
			next[p.GetId()] = c
			l.memory = figures.GetMemory().GetWorkingSetBytes().GetValue()
			l.setRates(last[p.GetId()], c)
		}
		loads = append(loads, l)
	}
	return loads, next
}

func totals(figures *runtimeapi.LinuxPodSandboxStats, now time.Time) counters {
	c := counters{at: now}
	if cpu := figures.GetCpu(); cpu.GetUsageCoreNanoSeconds() != nil {
		c.cpu, c.hasCPU, c.at = float64(cpu.GetUsageCoreNanoSeconds().GetValue()), true, time.Unix(0, cpu.GetTimestamp())
	}
	eth := figures.GetNetwork().GetDefaultInterface()
	c.traffic = float64(eth.GetRxBytes().GetValue()) + float64(eth.GetTxBytes().GetValue())
	return c
}

// setRates sets the rates between two samples. A counter that went down belongs to a new process: its rate is not known.
func (l *load) setRates(before, after counters) {
	seconds := after.at.Sub(before.at).Seconds()
	if before.at.IsZero() || seconds <= 0 {
		return
	}
	if before.hasCPU && after.hasCPU && after.cpu >= before.cpu {
		l.cores = (after.cpu - before.cpu) / 1e9 / seconds
	}
	if before.hasRequests && after.hasRequests && after.requests >= before.requests {
		l.requests = (after.requests - before.requests) / seconds
	}
	if after.traffic >= before.traffic {
		l.traffic = (after.traffic - before.traffic) / seconds
	}
}

// requestTotals returns the number of requests by pod, for the pods of components and those that have had some. The other pods
// serve their requests themselves, and the node reports 0.
func requestTotals(all []*runtimeapi.PodSandboxMetrics, pods []*runtimeapi.PodSandbox) map[string]float64 {
	totals := map[string]float64{}
	for _, p := range pods {
		if p.GetRuntimeHandler() == "wasm" {
			totals[p.GetId()] = 0
		}
	}
	for _, p := range all {
		for _, c := range p.GetContainerMetrics() {
			for _, m := range c.GetMetrics() {
				if v := m.GetValue().GetValue(); m.GetName() == stats.Requests.Name && v > 0 {
					totals[p.GetPodSandboxId()] += float64(v)
				}
			}
		}
	}
	return totals
}

// order is one column by which the table can be sorted.
type order struct {
	name, key string
	compare   func(x, y load) int
}

// orders lists the columns with the keys of the view. Figures begin with the largest, words with the first.
var orders = []order{
	{"cpu", "c", func(x, y load) int { return cmp.Compare(y.cores, x.cores) }},
	{"memory", "m", func(x, y load) int { return cmp.Compare(y.memory, x.memory) }},
	{"requests", "r", func(x, y load) int { return cmp.Compare(y.requests, x.requests) }},
	{"traffic", "t", func(x, y load) int { return cmp.Compare(y.traffic, x.traffic) }},
	{"name", "n", func(x, y load) int { return cmp.Or(cmp.Compare(x.namespace, y.namespace), cmp.Compare(x.name, y.name)) }},
	{"runtime", "k", func(x, y load) int { return cmp.Compare(x.runtime, y.runtime) }},
	{"state", "s", func(x, y load) int { return boolInt(y.ready) - boolInt(x.ready) }},
	{"age", "a", func(x, y load) int { return y.created.Compare(x.created) }},
}

func orderNames() []string {
	var names []string
	for _, o := range orders {
		names = append(names, o.name)
	}
	return names
}

func orderNamed(name string) (order, bool) {
	i := slices.IndexFunc(orders, func(o order) bool { return o.name == name })
	if i < 0 {
		return order{}, false
	}
	return orders[i], true
}

// sorted returns the loads in order. Names decide between equals, so that rows do not jump.
func (o order) sorted(loads []load, reverse bool) []load {
	byName := orders[slices.IndexFunc(orders, func(o order) bool { return o.name == "name" })]
	all := slices.Clone(loads)
	slices.SortStableFunc(all, func(x, y load) int {
		first := o.compare(x, y)
		if reverse {
			first = -first
		}
		return cmp.Or(first, byName.compare(x, y))
	})
	return all
}

// renderLoads returns the table: a line for the header and one for each pod.
func renderLoads(loads []load, now time.Time) []byte {
	var out bytes.Buffer
	t := newTable(&out, "NAMESPACE", "NAME", "RUNTIME", "STATE", "AGE", "CPU %", "MEM", "REQ/S", "NET/S")
	for _, l := range loads {
		t.row(l.namespace, l.name, l.runtime, podStateWord(l.ready), duration.HumanDuration(now.Sub(l.created)),
			known(l.cores, func(v float64) string { return fmt.Sprintf("%.1f", v*100) }), size(l.memory),
			known(l.requests, func(v float64) string { return fmt.Sprintf("%.1f", v) }),
			known(l.traffic, func(v float64) string { return size(uint64(v)) }))
	}
	_ = t.flush() // a buffer takes everything
	return out.Bytes()
}

// known formats a rate; a negative one is not known.
func known(rate float64, format func(float64) string) string {
	if rate < 0 {
		return "-"
	}
	return format(rate)
}
