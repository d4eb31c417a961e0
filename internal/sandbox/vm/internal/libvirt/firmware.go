package libvirt

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
)

// readRing is the monitor command that reads the firmware's ring buffer.
var readRing = fmt.Sprintf(`{"execute":"ringbuf-read","arguments":{"device":%q,"size":%d}}`, firmwareRing, boot.RingSize)

// Firmware implements machine.Driver. As a side effect, libvirt logs that a monitor command taints the domain
// ("custom-monitor").
func (d *Driver) Firmware(ctx context.Context, name string) (string, error) {
	domain, _, err := d.running(name)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	raw, err := ask(ctx, d.link, "read the firmware output of domain "+domain.Name, func(c *golibvirt.Libvirt) (string, error) {
		return c.QEMUDomainMonitorCommand(domain, readRing, 0)
	})
	if err != nil {
		return "", err
	}
	var answer struct {
		Return *string `json:"return"`
	}
	if err := json.Unmarshal([]byte(raw), &answer); err != nil || answer.Return == nil {
		return "", fmt.Errorf("read the firmware output of domain %s: unexpected answer %.200q: %w", domain.Name, raw, errdefs.ErrUnavailable)
	}
	return *answer.Return, nil
}
