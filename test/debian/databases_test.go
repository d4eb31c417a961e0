package debian

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/loopdev"
)

// Users and groups of the databases, the same as in hack/images/databases.sh.
const postgresUser, redisUser = "115:120", "116:121"

// Commands that prepare the read-only share with Debian's packages as a root directory for programs, and mount the
// block volume in it.
const (
	prepareRoot  = "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 shm /dev/shm && mount -t tmpfs -o mode=1777 tmp /debian/tmp && mount -t proc proc /debian/proc && mount --rbind /dev /debian/dev"
	mountVolume  = "mount -t ext4 /dev/volume /debian/data/block"
	formatVolume = "chroot /debian /sbin/mke2fs -q -t ext4 /dev/volume"
)

// TestDatabases: Debian's PostgreSQL and Redis run in a disk machine, each on a shared directory and on a block volume.
// Data and file owners survive restarts of the machine, by its power button and by force.
func TestDatabases(t *testing.T) {
	root := filepath.Join(harness.Root(), "build", "images", "databases", "root")
	if _, err := os.Stat(root); err != nil {
		t.Fatalf("%v; hack/images/databases.sh creates it", err)
	}
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 512<<20))
	shared, device := directory(t, "databases"), volume(t, 512<<20)
	c := d.RunVM(t, &harness.PodSpec{Name: "databases", Image: harness.DiskGuest,
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Mounts = []*runtimeapi.Mount{{HostPath: shared, ContainerPath: "/debian/data/shared"},
				{HostPath: root, ContainerPath: "/debian", Readonly: true}}
			c.Devices = []*runtimeapi.Device{{HostPath: device, ContainerPath: "/dev/volume", Permissions: "rwm"}}
		}}})
	m := machine{t, d, c}
	m.waitBoot(1)
	m.run(prepareRoot)
	m.run(formatVolume)
	m.run(mountVolume)
	places := []string{"shared", "block"}
	for i, place := range places {
		at := "/data/" + place
		m.run(fmt.Sprintf("set -e; cd /debian%s; mkdir -m 700 pg redis; chown %s pg; chown %s redis", at, postgresUser, redisUser))
		m.as(postgresUser, "/usr/lib/postgresql/15/bin/initdb -A trust -E UTF8 --locale=C --no-sync -D "+at+"/pg")
		m.serve(i, at)
		m.sql(i, "create table kept as select i, md5(i::text) from generate_series(1, 1000) i")
		m.redis(i, "set kept yes")
	}
	for boot, stop := range []time.Duration{time.Minute, 0} {
		m.run("sync")
		c.Stop(stop)
		c.WaitExit(map[bool]int32{true: 137, false: 0}[stop == 0])
		c.Start()
		m.waitBoot(boot + 2)
		m.run(prepareRoot)
		m.run(mountVolume)
		for i, place := range places {
			m.serve(i, "/data/"+place)
			if out := m.sql(i, "select count(*) from kept where md5(i::text) = md5"); out != "1000\n" {
				t.Errorf("boot %d: rows in PostgreSQL on the %s volume: got %q, want 1000", boot+2, place, out)
			}
			if out := m.redis(i, "get kept"); out != "yes\n" {
				t.Errorf("boot %d: value in Redis on the %s volume: got %q, want yes", boot+2, place, out)
			}
			want := "700 115:120\n600 115:120\n700 116:121\n"
			if out := m.run("cd /debian/data/" + place + " && stat -c '%a %u:%g' pg pg/PG_VERSION redis"); out != want {
				t.Errorf("boot %d: modes and owners on the %s volume: got %q, want %q", boot+2, place, out, want)
			}
		}
	}
	for name, uid := range map[string]uint32{"pg": 115, "pg/PG_VERSION": 115, "redis": 116, "redis/appendonlydir": 116} {
		info, err := os.Stat(filepath.Join(shared, name))
		if err != nil {
			t.Error(err)
		} else if got := info.Sys().(*syscall.Stat_t).Uid; got != uid {
			t.Errorf("owner of %s on the node: got %d, want %d", name, got, uid)
		}
	}
}

// machine is the machine in which the databases run.
type machine struct {
	t *testing.T
	d *harness.Daemon
	c *harness.Container
}

// waitBoot waits until the agent answers after the boot with this number.
func (m machine) waitBoot(boot int) {
	m.t.Helper()
	m.c.WaitGuestBoot(boot)
	harness.Eventually(m.t, harness.GuestTimeout, func() error {
		_, err := m.try("true")
		return err
	})
}

// serve starts both servers on the volume at, with ports for index i. PostgreSQL may have to recover first.
func (m machine) serve(i int, at string) {
	m.t.Helper()
	m.as(postgresUser, fmt.Sprintf("/usr/lib/postgresql/15/bin/pg_ctl -w -t 600 -D %s/pg -l %s/pg/log -o '-p %d -k /tmp -c listen_addresses=127.0.0.1' start || { cat /debian%s/pg/log; false; }", at, at, 5432+i, at))
	m.as(redisUser, fmt.Sprintf("/usr/bin/redis-server --port %d --dir %s/redis --appendonly yes --appendfsync always --daemonize yes", 6379+i,
		at))
	harness.Eventually(m.t, harness.GuestTimeout, func() error {
		if out := m.redis(i, "ping"); out != "PONG\n" {
			return fmt.Errorf("answer of Redis to a ping: got %q, want PONG", out)
		}
		return nil
	})
}

func (m machine) sql(i int, statement string) string {
	return m.as(postgresUser,
		fmt.Sprintf("/usr/bin/env LC_ALL=C /usr/lib/postgresql/15/bin/psql -At -h /tmp -p %d postgres -c '%s'", 5432+i, statement))
}

func (m machine) redis(i int, command string) string {
	out, _ := m.try(fmt.Sprintf("chroot /debian /usr/bin/redis-cli -p %d %s", 6379+i, command))
	return out
}

// as runs a command from Debian's packages as a user.
func (m machine) as(user, command string) string {
	m.t.Helper()
	return m.run("chroot /debian /usr/sbin/chroot --userspec=" + user + " --groups= / " + command)
}

// run runs a script in the guest and fails the test if the script fails.
func (m machine) run(script string) string {
	m.t.Helper()
	began := time.Now()
	out, err := m.try(script)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	m.t.Logf("%s: %s", strings.SplitN(script, "\n", 2)[0], time.Since(began).Round(100*time.Millisecond))
	return out
}

func (m machine) try(script string) (string, error) {
	const limit = 15 * time.Minute // for an emulated initdb on a busy machine
	ctx, cancel := context.WithTimeout(m.t.Context(), limit)
	defer cancel()
	resp, err := m.d.CRI().ExecSync(ctx,
		&runtimeapi.ExecSyncRequest{ContainerId: m.c.ID, Cmd: []string{"sh", "-c", script}, Timeout: int64(limit.Seconds()) - 1})
	if err == nil && resp.ExitCode != 0 {
		err = fmt.Errorf("code %d: %s", resp.ExitCode, resp.Stderr)
	}
	return string(resp.GetStdout()), err
}

// volume creates a block device of size bytes and returns its path.
func volume(t *testing.T, size int64) string {
	t.Helper()
	file := filepath.Join(directory(t, "volume"), "volume")
	err := os.WriteFile(file, nil, 0o600)
	if err == nil {
		err = os.Truncate(file, size)
	}
	if err != nil {
		t.Fatal(err)
	}
	return loopdev.Attach(t, file)
}
