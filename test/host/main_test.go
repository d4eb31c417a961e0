package host

import (
	"context"
	"fmt"
	"os"
	"testing"
)

// node is the machine, with the package installed.
var node *guest

func TestMain(m *testing.M) { os.Exit(inGuest(m)) }

func inGuest(m *testing.M) int {
	dir, keep := os.LookupEnv("TRIPOD_TEST_HOST")
	if !keep {
		temporary, err := os.MkdirTemp("/var/tmp", "tripod-host-")
		if err != nil {
			return complain(err)
		}
		defer os.RemoveAll(temporary)
		dir = temporary
	} else if err := os.MkdirAll(dir, 0o755); err != nil {
		return complain(err)
	}
	g, err := openGuest(dir)
	if err != nil {
		return complain(err)
	}
	if !keep {
		defer g.stop()
	}
	ctx, cancel := context.WithTimeout(context.Background(), bootTime)
	defer cancel()
	if out, err := g.command(ctx, prepare, nil); err != nil {
		return complain(fmt.Errorf("prepare the host: %w\n%s", err, out))
	}
	node = g
	return m.Run()
}

func complain(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// prepare starts the registry, which serves every name, and installs the package with its default configuration. It can
// be repeated.
const prepare = `set -e
cat >/etc/systemd/system/registry.service <<U
[Service]
WorkingDirectory=/payload
ExecStart=/payload/build/bin/images serve 127.0.0.1:5000
[Install]
WantedBy=multi-user.target
U
systemctl daemon-reload; systemctl enable --quiet --now registry
cd /payload; build/bin/images hosts 127.0.0.1:5000 /etc/tripod/certs.d
dpkg -i --force-confold /payload/tripod.deb
tripod rmp --all --force
`
