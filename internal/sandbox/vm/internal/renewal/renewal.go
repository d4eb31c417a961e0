// Package renewal has what is done in the guests of disk machines for templates: Settle in that of a template before it is saved,
// and Renew in one that has continued from a template. Both run a shell script by the guest's agent. The package must not know
// pods or where templates are.
package renewal

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
)

// outputLimit is how many bytes of a script's output are read, and quoteLimit how many an error quotes.
const outputLimit, quoteLimit = 32 << 10, 1 << 10

// settleScript waits until cloud-init and the services that the system starts are ready.
const settleScript = `command -v cloud-init >/dev/null || { echo "the guest has no cloud-init" >&2; exit 1; }
until [ -e /run/cloud-init/result.json ]; do sleep 0.2 || sleep 1; done
[ ! -d /run/systemd/system ] || systemctl is-system-running --wait >/dev/null || true
sync`

// Settle waits until a guest, whose agent has answered, can be saved.
func Settle(ctx context.Context, a *agent.Agent) error { return runScript(ctx, a, nil, settleScript) }

// runScript runs a shell script in the guest, with arguments and input. Its error is errdefs.ErrUnavailable if the agent does
// not answer, and otherwise quotes what the script wrote to its standard error.
func runScript(ctx context.Context, a *agent.Agent, input []byte, script string, args ...string) error {
	if err := a.Wait(ctx); err != nil {
		return err
	}
	words := &agent.Buffer{Limit: outputLimit}
	code, err := a.Exec(ctx, agent.Command{Dir: "/", ExecRequest: sandbox.ExecRequest{
		Cmd: append([]string{"/bin/sh", "-c", script, "tripod"}, args...), Stdin: bytes.NewReader(input), Stderr: words,
	}})
	if err == nil && code != 0 {
		said := words.String()
		err = fmt.Errorf("a script in the guest has failed with code %d: %q: %w", code, said[:min(len(said), quoteLimit)],
			errdefs.ErrFailedPrecondition)
	}
	return err
}

// renewScript makes a guest that has continued from a template the pod's. Its arguments are the node's time in nanoseconds, the
// guest's machine ID, and the MAC addresses of its interfaces; the input is the seed for Renew. The rest runs on while the
// container counts as started, as cloud-init does in a guest that boots.
//
// In /run/cloud-init stays only what the system makes at a boot before cloud-init runs; otherwise cloud-init would trust what it
// has found out about the template's instance. At a boot, the system brings the network up between the first two stages. Here
// the second stage does, because it takes itself for the first one that sees the instance.
const renewScript = `set -e
/proc/$PPID/exe renew "$1"
[ ! -s /etc/machine-id ] || echo "$2" >/etc/machine-id || true
shift 2
for file in /run/cloud-init/* /run/cloud-init/.[!.]*; do
	case ${file##*/} in enabled | cloud.cfg | ds-identify.log | cloud-init-generator.log) ;; *) rm -rf "$file" ;; esac
done
again='for mac; do
	for i in $(seq 200); do ! grep -qix "$mac" /sys/class/net/*/address || break; sleep 0.1 || sleep 1; done
done
cloud-init init --local
rm -f /var/lib/cloud/data/instance-id
cloud-init init
cloud-init modules --mode=config
cloud-init modules --mode=final
for unit in ssh sshd; do
	! command -v systemctl >/dev/null || systemctl try-restart "$unit"
done'
if [ -d /run/systemd/system ] && command -v systemd-run >/dev/null; then
	systemctl is-active -q tripod-renew || systemd-run --quiet --collect --no-block --unit=tripod-renew /bin/sh -c "$again" tripod "$@"
else
	setsid /bin/sh -c "$again" tripod "$@" </dev/null >/dev/console 2>&1 &
fi`

// Renew gives a guest that has continued from a template its clock, random numbers and machine ID at once, and the rest when
// cloud-init runs again. The UUID is that of the machine, and macs are the addresses of its interfaces.
func Renew(ctx context.Context, a *agent.Agent, uuid string, macs []string) error {
	if err := a.Wait(ctx); err != nil { // before the time is taken
		return err
	}
	seed := make([]byte, identity.SeedSize)
	rand.Read(seed)
	args := append([]string{strconv.FormatInt(time.Now().UnixNano(), 10), strings.ReplaceAll(uuid, "-", "")}, macs...)
	if err := runScript(ctx, a, seed, renewScript, args...); err != nil {
		return fmt.Errorf("prepare the guest for its pod: %w", err)
	}
	return nil
}
