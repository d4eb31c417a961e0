package libvirt

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// statsTimeout bounds a query, so that one machine cannot delay the statistics of all machines.
const statsTimeout = time.Second

// Stats implements machine.Driver. It returns errdefs.ErrFailedPrecondition if the machine is not running, and
// errdefs.ErrUnavailable if libvirt does not answer.
func (d *Driver) Stats(ctx context.Context, name string) (machine.Stats, error) {
	domain, def, err := d.running(name)
	if err != nil {
		return machine.Stats{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	records, err := ask(ctx, d.link, "query the statistics of domain "+domain.Name,
		func(c *golibvirt.Libvirt) ([]golibvirt.DomainStatsRecord, error) {
			return c.ConnectGetAllDomainStats([]golibvirt.Domain{domain}, uint32(golibvirt.DomainStatsBalloon|golibvirt.DomainStatsBlock),
				uint32(golibvirt.ConnectGetAllDomainsStatsNowait))
		})
	if err != nil {
		return machine.Stats{}, err
	}
	if len(records) != 1 {
		return machine.Stats{}, fmt.Errorf("query the statistics of domain %s: libvirt returned none: %w", domain.Name, errdefs.ErrUnavailable)
	}
	return parseStats(records[0].Params, def.Disks), nil
}

// parseStats parses libvirt's parameters (virConnectGetAllDomainStats). The parameters block.N.* belong to the domain's
// disk with index N.
func parseStats(params []golibvirt.TypedParam, disks []machine.Disk) machine.Stats {
	stats := machine.Stats{Blocks: map[string]machine.BlockStats{}}
	for _, p := range params {
		value, ok := toUint64(p.Value.I)
		if !ok {
			continue
		}
		if p.Field == "balloon.current" {
			stats.Memory = value << 10
			continue
		}
		parts := strings.SplitN(p.Field, ".", 3)
		if len(parts) != 3 || parts[0] != "block" {
			continue
		}
		n, err := strconv.Atoi(parts[1])
		if err != nil || n < 0 || n >= len(disks) {
			continue
		}
		block := stats.Blocks[disks[n].ID]
		switch parts[2] {
		case "rd.bytes":
			block.ReadBytes = value
		case "rd.reqs":
			block.ReadOps = value
		case "wr.bytes":
			block.WriteBytes = value
		case "wr.reqs":
			block.WriteOps = value
		}
		stats.Blocks[disks[n].ID] = block
	}
	return stats
}

func toUint64(v any) (uint64, bool) {
	switch v := v.(type) {
	case uint64:
		return v, true
	case int64:
		return uint64(v), v >= 0
	case uint32:
		return uint64(v), true
	case int32:
		return uint64(v), v >= 0
	default:
		return 0, false
	}
}
