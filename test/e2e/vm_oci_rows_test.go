package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

var processRows = []equalRow{
	{name: "arguments", want: "[ü$HOME]", options: options(func(c *runtimeapi.ContainerConfig) {
		c.Command, c.Args = []string{"printf"}, []string{`[%s]\n`, "a b", "", "ü$HOME", "a\nb"}
	})},
	{name: "environment", want: "ODD=", script: `cat /proc/1/environ | tr '\0' '\n'`, options: options(func(c *runtimeapi.ContainerConfig) {
		for _, e := range []string{"SPACE= x  y ", "EMPTY=", "ODD=\x01\t\x7fé\"'\\$(A)`", "LINES=a\nb", "EQUAL=a=b", "PATH=/bin:/x"} {
			k, v, _ := strings.Cut(e, "=")
			c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: k, Value: []byte(v)})
		}
	})},
	{name: "working directory", want: "/new/dir", script: "pwd; stat -c '%a %u %g' /new /new/dir",
		options: options(func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/new/dir" })},
	{name: "image configuration", image: harness.Config, want: "GREETING=hello", options: options(func(c *runtimeapi.ContainerConfig) {
		c.Args = []string{"id; pwd; env; cat /data/seed own; stat -c '%n %a %u %g' /srv /data own"}
	})},
	{name: "process", want: "NSpid:\t1\n",
		script: "umask; grep -E '^(Umask|NSpid|NSpgid|NSsid|Sig[BCP].*|TracerPid|CoreDumping|THP_enabled):' /proc/1/status; tr '\\0' ' ' </proc/1/cmdline; cat /proc/1/sessionid"},
	{name: "limits", want: "enough",
		script: "grep -vE 'pending signals|processes|open files' /proc/self/limits; [ $(ulimit -Hn) -ge 20000 ] && [ $(ulimit -Sn) -ge 1024 ] && echo enough"},
	{name: "names", want: "equal-host",
		script: "hostname; echo $HOSTNAME; cat /etc/hostname /etc/hosts /etc/resolv.conf; stat -c '%n %a %u %g' /etc/hostname /etc/hosts /etc/resolv.conf"},
	{name: "hosts file", want: "203.0.113.7", script: "cat /etc/hosts; echo more >>/etc/hosts; tail -n 1 /etc/hosts",
		options: options(volume("hosts", "/etc/hosts"))},
	{name: "sysctls", want: "20000",
		script: "cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_local_port_range /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/ipv4/ping_group_range /proc/sys/kernel/shmmax /proc/sys/kernel/msgmax /proc/sys/fs/mqueue/msg_max"},
	{name: "devices", want: "/dev/null",
		script: "find /dev -exec stat -c '%n %F %a %u %g %t:%T' {} + | sort; df -k /dev /dev/shm | awk '{print $2, $6}'; readlink /dev/fd; readlink /dev/stdin"},
	{name: "device access",
		script: "head -c 4 /dev/zero | od; echo x >/dev/null; echo y >/dev/full; mknod /tmp/sda b 8 0; head -c 1 /tmp/sda; mknod /tmp/null c 1 3; echo z >/tmp/null; mknod /tmp/kmsg c 1 11; head -n 1 /tmp/kmsg | wc -c"},
	{name: "shared memory", want: "kept", script: "echo kept >/dev/shm/file; cat /dev/shm/file; stat -c '%a %u %g' /dev/shm/file"},
	{name: "shared memory of the next container", want: "kept", script: "cat /dev/shm/file"},
	{name: "interfaces", want: "eth0",
		script: "ls /sys/class/net; cat /sys/class/net/eth0/mtu; ip -o -4 addr show | awk '{print $2, $4}'; ip route | sed 's/ *$//'; cat /proc/sys/net/ipv6/conf/all/disable_ipv6; ping -c 1 -q 127.0.0.1 | grep received"},
	{name: "requests and clock", want: "clock is right: true", script: "cat /proc/1/oom_score_adj; date +%Z; " + idle,
		options: options(resources(&runtimeapi.LinuxContainerResources{
			MemoryLimitInBytes: 64 << 20, CpuShares: 512, CpuQuota: 50000, CpuPeriod: 100000, OomScoreAdj: 500,
		})), act: func(c *equalRun) string {
			var at int64
			if _, err := fmt.Sscan(c.Must("date", "+%s"), &at); err != nil {
				c.t.Error(err)
			}
			return fmt.Sprint("clock is right: ", time.Since(time.Unix(at, 0)).Abs() < 30*time.Second)
		}},
}

var userRows = []equalRow{
	{name: "user and groups", want: "1000 2000",
		script: "id; echo $(id -u) $(id -g); grep -E '^(Uid|Gid|Groups|Cap.*):' /proc/self/status; touch /tmp/file /file; stat -c '%n %a %u %g' /tmp/file; echo $HOME", code: 0, options: secured(func(s *security) {
			s.RunAsUser, s.RunAsGroup, s.SupplementalGroups = value(1000), value(2000), []int64{4000, 3000, 4000}
		})},
	{name: "nobody", want: "65534", script: "id; echo $HOME; cat /proc/1/status | grep Cap; cat /root/x; kill -0 1",
		options: secured(func(s *security) { s.RunAsUsername = "nobody" })},
	{name: "unknown user name", want: "whoever", script: "id", options: secured(func(s *security) { s.RunAsUsername = "whoever" })},
	{name: "strict groups", want: "7", script: "id -G", image: harness.Config, options: secured(func(s *security) {
		s.RunAsUser, s.RunAsGroup, s.SupplementalGroups, s.SupplementalGroupsPolicy = value(33), value(6), []int64{7},
			runtimeapi.SupplementalGroupsPolicy_Strict
	})},
	{name: "ports of a user", want: "listens",
		script:  "httpd -p 80 && echo listens; ping -c 1 -q 127.0.0.1; cat /proc/sys/net/ipv4/ping_group_range",
		options: secured(func(s *security) { s.RunAsUser = value(1000) })},
}

const capsAndSeccomp = "grep -E '^(Cap.*|NoNewPrivs|Seccomp):' /proc/self/status; "

var securityRows = []equalRow{
	{name: "default capabilities", want: "CapEff", script: capsAndSeccomp + "chown 1 /tmp; mount -t tmpfs none /mnt", code: 1},
	{name: "add and drop", want: "CapEff", script: capsAndSeccomp + "chown 1 /tmp; mount -t tmpfs none /mnt && echo mounted",
		options: secured(func(s *security) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN", "net_admin"}, DropCapabilities: []string{"CHOWN"}}
		}), code: 0},
	{name: "drop all", want: "CapEff:\t0000000000000000", script: capsAndSeccomp, options: secured(func(s *security) {
		s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
	})},
	{name: "ambient", want: "CapAmb", script: capsAndSeccomp, options: secured(func(s *security) {
		s.RunAsUser, s.Capabilities = value(1000),
			&runtimeapi.Capability{AddCapabilities: []string{"NET_RAW"}, AddAmbientCapabilities: []string{"NET_RAW"}}
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	})},
	{name: "setuid", image: harness.NoNewPrivs, want: "0", options: secured(func(s *security) { s.RunAsUser = value(1000) })},
	{name: "no new privileges", image: harness.NoNewPrivs, want: "1000",
		options: secured(func(s *security) { s.RunAsUser, s.NoNewPrivs = value(1000), true })},
	{name: "seccomp", want: "Seccomp:\t2", script: capsAndSeccomp + "unshare -U true; unshare -m true; echo $?",
		options: secured(func(s *security) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		})},
	{name: "masked paths", want: "0\n",
		script: "wc -c </bin/busybox; ls /var | wc -l; echo x >/etc/passwd; echo x >/proc/sys/net/ipv4/ip_forward",
		options: secured(func(s *security) {
			s.MaskedPaths, s.ReadonlyPaths = []string{"/bin/busybox", "/var", "/no/such"}, []string{"/etc", "/proc/sys", "/no/such"}
		}), code: 1},
	{name: "writes below proc", script: "echo 1 >/proc/sys/kernel/panic; echo 1 >/proc/sys/net/ipv4/ip_forward; touch /sys/x", code: 1},
	{name: "readonly rootfs",
		script: "echo x >/file; rm /bin/ls; echo x >/tmp/file; echo x >/dev/shm/rofile && cat /dev/shm/rofile; echo x >/etc/hosts", want: "x\n",
		code: 1, options: secured(func(s *security) { s.ReadonlyRootfs = true })},
}

var outputRows = []equalRow{
	{name: "both streams", want: "out",
		script: "echo out; echo error >&2; cat; readlink /proc/self/fd/0; echo; echo; echo ' '; printf '\\r\\n\\0\\n'; printf 'no end'; printf 'no end' >&2"},
	{name: "long line and many lines", want: "0000",
		script: "head -c 20000 /dev/zero | tr '\\0' 0; echo; head -c 40000 /dev/zero | tr '\\0' 1 >&2; echo >&2; seq 3000; seq 3000 >&2"},
	{name: "binary output", want: "ELF", script: "head -c 100000 /bin/busybox"},
	{name: "terminal", want: "\r\n",
		script:  "tty; stty -a; echo $TERM; stat -c '%n %a %u %g' /dev/console; echo error >&2; [ -t 0 ] && [ -t 2 ] && echo terminal",
		options: options(func(c *runtimeapi.ContainerConfig) { c.Tty = true })},
	{name: "input", want: "some input", script: "cat; echo end",
		options: options(func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true }), act: func(c *equalRun) string {
			var out strings.Builder
			_, err := harness.Stream(context.Background(), harness.SPDY, c.AttachURL(true, false),
				remotecommand.StreamOptions{Stdin: strings.NewReader("some input\n"), Stdout: &out, Stderr: &out})
			c.WaitExit(0)
			return fmt.Sprint(out.String(), err)
		}},
	{name: "exec", want: "1000", script: "echo log; " + idle,
		options: options(harness.Security(func(s *security) { s.RunAsUser = value(1000) }), func(c *runtimeapi.ContainerConfig) {
			c.WorkingDir, c.Envs = "/tmp", []*runtimeapi.KeyValue{{Key: "A", Value: []byte("b c")}}
		}), act: func(c *equalRun) string {
			var b strings.Builder
			for _, argv := range [][]string{
				{"sh", "-c", "id; pwd; env | sort; " + capsAndSeccomp}, {"sh", "-c", "echo out; echo error >&2; exit 3"}, {"sh", "-c", "kill -9 $$"},
				{"sh", "-c", "kill $$"},
				{"seq", "20000"}, {"sh", "-c", "head -c 200000 /bin/busybox"}, {"printf", "no end"}, {"cat"}, {"printf", "[%s]", "", "a b"},
			} {
				out, errs, code := c.ExecSync(argv...)
				fmt.Fprintf(&b, "%q %d %q\n%s\n", argv, code, errs, out)
			}
			for _, argv := range [][]string{{"/no/such"}, {"/etc/passwd"}, {}} {
				resp, err := c.d.CRI().ExecSync(c.t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: argv, Timeout: 60})
				fmt.Fprintf(&b, "%q %d %s\n", argv, resp.GetExitCode(), answered(err))
			}
			for _, tty := range []bool{false, true} {
				fmt.Fprintf(&b, "%+v\n",
					c.Exec(harness.SPDY, strings.NewReader("typed\n"), tty, "sh", "-c", "read x; echo got $x; [ -t 1 ] && stty -a; exit 4"))
			}
			return b.String()
		}},
}

var endRows = []equalRow{
	{name: "exit 3", script: "exit 3", code: 3},
	{name: "out of memory",
		options: options(harness.Command("tail", "/dev/zero"), resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 32 << 20})),
		code:    137, want: "OOMKilled"},
	{name: "no such program", options: options(harness.Command("/no/such")), code: 128, want: "no"},
	{name: "not executable", options: options(harness.Command("/etc/passwd")), code: 128, want: "ermission"},
	{name: "working directory is a file", script: "pwd",
		options: options(func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/etc/passwd" }), code: 128},
	{name: "stop", script: "trap 'echo bye; exit 5' TERM; echo ready; sleep 3600 & wait", code: 5, want: "bye", act: whenReady},
	{name: "stop signal of the image", image: harness.StopSignal, code: 7, want: "USR1", act: whenReady},
	{name: "stop signal of the container", script: "trap 'echo int; exit 6' INT; trap 'exit 9' TERM; echo ready; sleep 3600 & wait", code: 6,
		want: "int", options: options(func(c *runtimeapi.ContainerConfig) { c.StopSignal = runtimeapi.Signal_SIGNAL_SIGINT }), act: whenReady},
	{name: "stop without effect", script: "trap '' TERM; echo ready; while :; do sleep 1; done", code: 137, want: "ready",
		act: func(c *equalRun) string {
			c.WaitLog("ready")
			c.Stop(time.Second)
			return ""
		}},
}

func whenReady(c *equalRun) string {
	c.WaitLog("ready")
	return ""
}

var fileRows = []equalRow{
	{name: "files of the image", want: "/bin/busybox",
		script: "find / -xdev -type d -exec stat -c '%n %a %u %g' {} + | sort; find / -xdev ! -type d ! -path '/etc/[hr][oe]s*' -exec stat -c '%n %F %a %u %g %h %s %Y' {} + | sort; find / -xdev -type l -exec ls -l {} + | awk '{print $9, $11}'; find /bin /layers /etc/passwd -type f -exec md5sum {} + | sort; cat /layers/kept", image: harness.Layers},
	{name: "writes to the image", image: harness.Layers,
		script: "cd /layers; echo x >>kept; rm replaced; echo y >a; cat a b; mv opaque moved; mv linked other; ln kept hard; ln -s kept soft; mkdir -p d/e; mkfifo d/f; chmod 4711 setuid; chown 7:8 setuid; truncate -s 1000000 sparse; rm -r becomes-dir; mkdir becomes-dir; find . -exec stat -c '%n %F %a %u %g %h %s' {} + | sort; echo z >setuid; stat -c '%a' setuid"},
}

// makeVolumes makes the sources of the volumes of a pod.
func makeVolumes(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode, uid, gid int) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	write("hosts", "203.0.113.7 seven\n", 0o644, 0, 0)
	write("data/seed", "from the node\n", 0o640, 1000, 2000)
	write("data/sub/file", "below\n", 0o600, 0, 0)
	write("private/file", "private\n", 0o600, 1000, 1000)
	write("single", "single\n", 0o644, 0, 0)
	write("owners/file", "", 0o644, 0, 0)
	write("config/..one/key", "one\n", 0o644, 0, 0)
	write("config/..two/key", "two\n", 0o644, 0, 0)
	for link, to := range map[string]string{"config/..data": "..one", "config/key": "..data/key", "data/link": "seed",
		"data/absolute": "/etc/passwd", "alias": "data"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mknod(filepath.Join(dir, "owners", "socket"), syscall.S_IFSOCK|0o666, 0); err != nil {
		t.Fatal(err)
	}
	write("group/kept", "kept\n", 0o660, 0, 2000) // what a kubelet makes of a volume with the fsGroup 2000
	write("group/theirs", "theirs\n", 0o600, 0, 0)
	if err := errors.Join(os.Chown(filepath.Join(dir, "group"), 0, 2000),
		os.Chmod(filepath.Join(dir, "group"), 0o775|os.ModeSetgid)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "empty"), 0o1777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// onNode lists the files of a volume as the node sees them.
func (c *equalRun) onNode(name string) string {
	c.t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(filepath.Join(c.dir, name), func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		size := st.Size
		if info.IsDir() {
			size = 0
		}
		fmt.Fprintf(&b, "%s %s %d:%d links=%d size=%d\n", path, info.Mode(), st.Uid, st.Gid, st.Nlink, size)
		return nil
	})
	if err != nil {
		c.t.Error(err)
	}
	return b.String()
}

// onNodeWhenDone waits for the container's end and lists a volume.
func onNodeWhenDone(name string) func(*equalRun) string {
	return func(c *equalRun) string {
		c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
		return c.onNode(name)
	}
}

var volumeRows = []equalRow{
	{name: "volume", want: "from the node", options: options(volume("data", "/data")), act: onNodeWhenDone("data"),
		script: "cd /data; cat seed link absolute sub/file; ls -Rln . | awk '{print $1, $2, $3, $4, $9}'; echo new >new; mkdir -p dir/deep; ln new hard; ln -s new soft; mkfifo fifo; chmod 4755 new; chown 5:6 hard; mv sub moved; rm link; touch -d '2001-02-03 00:00:00' seed; stat -c '%h %s' new; stat -c %Y seed; truncate -s 100000 sparse; echo appended >>seed; cat new hard soft seed"},
	{name: "read-only volume",
		script: "cat /data/seed; echo x >/data/seed; touch /data/x; rm /data/seed; chmod 777 /data/seed; touch -c /data/seed",
		want:   "from the node", code: 1, options: options(readonly("data", "/data"))},
	{name: "file as a volume",
		script: "cat /single /etc/single; echo more >>/single; echo x >>/etc/single; cat /single; mv /single /x; stat -c '%F %a %u %g %s' /single", want: "single\nmore", options: options(volume("single", "/single"), readonly("single", "/etc/single")), act: func(c *equalRun) string {
			c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
			text, err := os.ReadFile(filepath.Join(c.dir, "single"))
			return fmt.Sprint(string(text), err)
		}},
	{name: "volume in a volume", script: "cat /mnt/inner/file; ls -n /mnt | awk '{print $1, $3, $9}'; echo x >/mnt/inner/y", want: "private",
		code: 0, options: options(volume("private", "/mnt/inner"), volume("empty", "/mnt")), act: onNodeWhenDone("empty")},
	{name: "paths of volumes",
		script: "cat /linked/seed; cat /part/file; cd /part; ls ..; pwd; stat -c '%a %u %g' /missing; echo x >/missing/x", want: "from the node",
		options: options(volume("alias", "/linked"), volume("data/moved", "/part"), volume("missing", "/missing")),
		act:     onNodeWhenDone("missing")},
	{name: "another user's volume", script: "cat /mnt/file; echo x >/mnt/x; echo y >/tmp2/y; stat -c '%a %u %g' /tmp2/y", want: "private",
		code: 0, options: options(volume("private", "/mnt"), volume("empty", "/tmp2"),
			harness.Security(func(s *security) { s.RunAsUser = value(1000) })), act: onNodeWhenDone("empty")},
	{name: "volume of the pod's group",
		script: "id -G; echo x >/mnt/x && mkdir /mnt/d && echo y >/mnt/d/y && mv /mnt/x /mnt/z && stat -c '%A %u %g' /mnt/z /mnt/d /mnt/d/y; ln -s z /mnt/l; rm /mnt/d/y; cat /mnt/kept; echo more >>/mnt/kept; echo x >/mnt/theirs; ls /mnt", want: "drwxr-sr-x 1000 2000", options: options(volume("group", "/mnt"), harness.Security(func(s *security) {
			s.RunAsUser, s.RunAsGroup, s.SupplementalGroups = value(1000), value(1000), []int64{2000}
		})), act: onNodeWhenDone("group")},
	{name: "big file", script: "dd if=/dev/zero of=/mnt/big bs=64k count=100 2>/dev/null; head -c 3000000 /bin/busybox | md5sum; for i in 1 2 3; do head -c 1000000 /bin/busybox; done >>/mnt/big; md5sum /mnt/big; for i in $(seq 300); do echo $i >/mnt/$i; done; ls /mnt | wc -l; cat /mnt/[0-9]* | md5sum; rm /mnt/[0-9]*; ls /mnt | wc -l", want: "-", options: options(volume("empty", "/mnt")), act: onNodeWhenDone("empty")},
	{name: "owners", script: "chown 1000:1000 /mnt/file; stat -c %F /mnt/socket; echo ready; " + idle, want: "1000:1000",
		options: options(volume("owners", "/mnt")), act: func(c *equalRun) string {
			c.WaitLog("ready")
			before := c.onNode("owners")
			if err := os.Chown(filepath.Join(c.dir, "owners", "file"), 77, 88); err != nil {
				c.t.Error(err)
			}
			return before + c.eventually("stat", "-c", "%u:%g", "/mnt/file")("77:88\n")
		}},
	{name: "changes on the node", script: idle, want: "two",
		options: options(volume("config", "/config"), readonly("owners", "/mnt"), readonly("config/key", "/key")), act: func(c *equalRun) string {
			got := c.Must("cat", "/config/key", "/key")
			at := filepath.Join(c.dir, "config")
			if err := os.Symlink("..two", filepath.Join(at, "..tmp")); err != nil {
				c.t.Error(err)
			}
			if err := os.Rename(filepath.Join(at, "..tmp"), filepath.Join(at, "..data")); err != nil {
				c.t.Error(err)
			}
			got += c.eventually("cat", "/config/key")("two\n")
			if err := os.RemoveAll(filepath.Join(at, "..one")); err != nil {
				c.t.Error(err)
			}
			got += c.Must("cat", "/config/key", "/key") + c.Must("ls", "/config/")
			if err := os.WriteFile(filepath.Join(c.dir, "owners", "new"), []byte("new on the node\n"), 0o600); err != nil {
				c.t.Error(err)
			}
			return got + c.eventually("cat", "/mnt/new")("new on the node\n")
		}},
	{name: "FIFO between containers", script: "mkfifo /mnt/fifo; echo ready; read line </mnt/fifo; echo got $line", want: "got hello",
		options: options(volume("empty", "/mnt")), act: func(c *equalRun) string {
			c.WaitLog("ready")
			partner := c.Pod.Run(harness.ContainerConfig("partner", harness.Busybox, harness.Shell("echo hello >/mnt/fifo"),
				volume(filepath.Join(c.dir, "empty"), "/mnt")))
			defer partner.Remove()
			return fmt.Sprint(partner.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED).ExitCode,
				c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED).ExitCode)
		}},
	{name: "setuid into a volume", image: harness.NoNewPrivs, script: "cp /nnp /mnt/nnp; chmod 4755 /mnt/nnp",
		options: options(volume("empty", "/mnt"))},
	{name: "setuid in a volume", image: harness.NoNewPrivs, want: "uid",
		options: options(harness.Command("/mnt/nnp"), volume("empty", "/mnt"),
			harness.Security(func(s *security) { s.RunAsUser = value(1000) }))},
	{name: "device in a volume", script: "mknod /mnt/null c 1 3; echo x >/mnt/null; stat -c %F /mnt/null; rm /mnt/null", want: "",
		options: options(volume("empty", "/mnt"))},
}

// eventually runs a program in the container until it prints the given text, and returns what it printed last. A machine may
// see changes of the node with a delay of some seconds.
func (c *equalRun) eventually(argv ...string) func(want string) string {
	return func(want string) string {
		began := time.Now()
		for {
			out, errs, code := c.ExecSync(argv...)
			if out == want || time.Since(began) > 10*time.Second {
				c.t.Logf("%q: %q after %s", argv, out, time.Since(began).Round(10*time.Millisecond))
				return fmt.Sprint(out, errs, code)
			}
			time.Sleep(100 * time.Millisecond) // pacing: nothing announces that the guest sees a change of the node
		}
	}
}

var privilegedRows = []equalRow{
	{name: "processes of the pod", script: idle, want: "4321", options: secured(sharedPID), act: func(c *equalRun) string {
		partner := c.Pod.Run(harness.ContainerConfig("partner", harness.Busybox, harness.Shell("sleep 4321 & wait"), harness.Security(sharedPID)))
		defer partner.Remove()
		partner.WaitState(runtimeapi.ContainerState_CONTAINER_RUNNING)
		got := c.Must("sh", "-c",
			"until pgrep sleep; do sleep 0.1; done >/dev/null; ps -o comm,args | grep -v ps; tr '\\0' ' ' </proc/1/cmdline; echo shared >/dev/shm/x") + partner.Must("cat", "/dev/shm/x")
		c.Must("sh", "-c", "kill -9 $(ps -o pid,args | awk '/slee[p] 4321/ {print $1}')")
		return fmt.Sprint(got, partner.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED).ExitCode)
	}},
	{name: "killed in the pod", script: "kill -9 $$", code: 137, options: secured(sharedPID)},
	{name: "terminated in the pod", script: "kill $$; sleep 5", code: 143, options: secured(sharedPID)},
	{name: "orphans", script: "(sleep 1; echo late) & echo first", want: "first", options: secured(sharedPID)},
	{name: "privileged", script: "mount -t tmpfs none /mnt && echo mounted; echo 1 >/proc/sys/net/ipv4/ip_forward && cat /proc/sys/net/ipv4/ip_forward", want: "mounted", options: secured(func(s *security) { s.Privileged = true })},
	{name: "unprivileged beside it", script: capsAndSeccomp + "mount -t tmpfs none /mnt", want: "Cap", code: 1},
}

func sharedPID(s *security) { s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD }
