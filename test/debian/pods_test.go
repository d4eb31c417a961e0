package debian

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const databasesImage = harness.ImagePrefix + "tripod/debian/databases:12"

// pushDatabases pushes an image with Debian's PostgreSQL and Redis.
func pushDatabases(t *testing.T) {
	t.Helper()
	root := filepath.Join(harness.Root(), "build", "images", "databases", "root")
	if _, err := os.Stat(root); err != nil {
		t.Fatalf("%v; hack/images/databases.sh creates it", err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		tar := exec.Command("tar", "-C", root, "--owner=0", "--group=0", "--sort=name", "--mtime=@0", "-c", ".")
		out, err := tar.StdoutPipe()
		if err != nil {
			return nil, err
		}
		return out, tar.Start()
	}, tarball.WithCompressionLevel(1))
	if err != nil {
		t.Fatal(err)
	}
	pushLayer(t, databasesImage, layer)
}

// database is a server in a container, with a volume that belongs to a group, as a kubelet prepares a persistent volume of a pod
// with fsGroup.
type database struct {
	name     string
	uid, gid int64
	// prepare makes the files on the volume /data, serve runs the server, and ready succeeds when it serves.
	prepare, serve, ready string
	// write stores something, and read prints want.
	write, read, want string
}

var servers = []database{
	{
		name: "postgres", uid: 115, gid: 120,
		prepare: "/usr/lib/postgresql/15/bin/initdb -A trust -E UTF8 --locale=C -D /data/pg",
		serve:   "exec /usr/lib/postgresql/15/bin/postgres -D /data/pg -k /tmp -c listen_addresses=127.0.0.1",
		ready:   "/usr/lib/postgresql/15/bin/psql -At -h /tmp postgres -c 'select 1'",
		write:   "/usr/lib/postgresql/15/bin/psql -At -h /tmp postgres -c 'create table if not exists kept as select i, md5(i::text) from generate_series(1, 1000) i'",
		read:    "/usr/lib/postgresql/15/bin/psql -At -h /tmp postgres -c 'select count(*) from kept where md5(i::text) = md5'",
		want:    "1000\n",
	},
	{
		name: "redis", uid: 116, gid: 121,
		prepare: "mkdir /data/redis",
		serve:   "exec /usr/bin/redis-server --dir /data/redis --appendonly yes --appendfsync always",
		ready:   "/usr/bin/redis-cli ping",
		write:   "/usr/bin/redis-cli set kept yes",
		read:    "/usr/bin/redis-cli get kept",
		want:    "yes\n",
	},
}

// TestDatabasesInPods: Debian's PostgreSQL and Redis, as pods on the node and in machines: with users and volumes of the pod's
// group, made by an init container. Debian's nginx serves one of the volumes beside them. Data and owners survive restarts of
// the containers, a new pod, and a machine that is killed.
func TestDatabasesInPods(t *testing.T) {
	pushDatabases(t)
	d := harness.StartDaemon(t, harness.VMOCI(t), harness.Set("vm.default_memory", 512<<20))
	d.Pull(t, databasesImage)
	for _, handler := range []string{"linux", harness.OCIHandler} {
		t.Run(handler, func(t *testing.T) {
			volumes := map[string]string{}
			for _, s := range servers {
				volumes[s.name] = directory(t, s.name)
				if err := os.Chown(volumes[s.name], 0, int(s.gid)); err != nil {
					t.Fatal(err)
				}
				if err := os.Chmod(volumes[s.name], 0o775|os.ModeSetgid); err != nil {
					t.Fatal(err)
				}
			}
			in := func(s database, name, script string) *runtimeapi.ContainerConfig {
				return harness.ContainerConfig(name, databasesImage, harness.Shell(script), func(c *runtimeapi.ContainerConfig) {
					c.Envs = []*runtimeapi.KeyValue{{Key: "LC_ALL", Value: []byte("C")}}
					c.Mounts = []*runtimeapi.Mount{{HostPath: volumes[s.name], ContainerPath: "/data"}}
					sc := c.Linux.SecurityContext
					// The process is of another group than the volume's, which is a supplementary one.
					sc.RunAsUser, sc.RunAsGroup, sc.SupplementalGroups = &runtimeapi.Int64Value{Value: s.uid}, &runtimeapi.Int64Value{Value: s.uid},
						[]int64{s.gid}
				})
			}
			newPod := func() *harness.Pod { return d.RunPodWith(t, harness.PodConfig(t, "databases"), handler) }
			web := func(c *runtimeapi.ContainerConfig) {
				c.Mounts = []*runtimeapi.Mount{{HostPath: volumes["redis"], ContainerPath: "/usr/share/nginx/html", Readonly: true}}
			}
			p := newPod()
			for _, s := range servers {
				c := p.Run(in(s, "init-"+s.name, s.prepare))
				eventually(t, c, func() error {
					if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
						return fmt.Errorf("%s is %s", s.Metadata.Name, s.State)
					}
					return nil
				})
				c.WaitExit(0)
			}
			serve := func(attempt int) (running []*harness.Container) {
				for _, s := range servers {
					c := p.Run(in(s, fmt.Sprint(s.name, attempt), s.serve))
					eventually(t, c, func() error {
						if _, stderr, code := c.ExecSync("sh", "-c", s.ready); code != 0 {
							return fmt.Errorf("%s is not ready: code %d: %s", s.name, code, stderr)
						}
						return nil
					})
					if attempt == 0 {
						c.Must("sh", "-c", s.write)
					}
					if got := c.Must("sh", "-c", s.read); got != s.want {
						t.Errorf("%s in attempt %d: got %q, want %q", s.name, attempt, got, s.want)
					}
					running = append(running, c)
				}
				return running
			}
			nginx := p.Run(harness.ContainerConfig("nginx", harness.Nginx, web))
			address := p.Forward(t, 80)
			eventually(t, nginx, func() error {
				page, err := harness.Fetch(t.Context(), harness.Reconnecting, "http://"+address+"/name")
				if err == nil && page != "redis\n" {
					t.Errorf("page of nginx: got %q, want the file on the volume", page)
				}
				return err
			})
			nginx.Stop(time.Minute)
			nginx.WaitExit(0)
			for _, c := range serve(0) { // stopped as a kubelet does it
				c.Stop(time.Minute)
				c.WaitExit(0)
			}
			for _, c := range serve(1) { // killed
				c.Stop(0)
			}
			p.Remove()
			p = newPod()
			serve(2)
			if handler == harness.OCIHandler {
				if err := syscall.Kill(p.MachinePid(), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				p.Remove()
				p = newPod()
				serve(3)
			}
			p.Remove()
			for _, f := range []struct {
				volume, file string
				uid          uint32
			}{{"postgres", "pg", 115}, {"postgres", "pg/PG_VERSION", 115}, {"redis", "redis", 116}, {"redis", "redis/appendonlydir", 116}} {
				info, err := os.Stat(filepath.Join(volumes[f.volume], f.file))
				if err != nil {
					t.Error(err)
				} else if got := info.Sys().(*syscall.Stat_t); got.Uid != f.uid {
					t.Errorf("owner of %s on the node: got %d, want %d", f.file, got.Uid, f.uid)
				}
			}
		})
	}
}

// eventually is harness.Eventually for emulated databases on a busy machine. It shows the container's log in the end.
func eventually(t *testing.T, c *harness.Container, cond func() error) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", c.Config.Metadata.Name, harness.Text(c.Logs(), "stdout")+harness.Text(c.Logs(), "stderr"))
		}
	}()
	harness.Eventually(t, 10*time.Minute, cond)
}
