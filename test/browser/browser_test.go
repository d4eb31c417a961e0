package browser

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

const (
	greeter = "/greet.v1.Greeter"
	// limit bounds each wait for a program.
	limit = time.Minute
)

// annotate adds annotations of components, without their prefix, to a pod.
func annotate(pairs ...string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			c.Annotations["vimana.host/"+pairs[i]] = pairs[i+1]
		}
	}
}

// built returns the path of a file that make test-browser builds.
func built(t *testing.T, path string) string {
	t.Helper()
	path = filepath.Join(harness.Root(), "build", path)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v; make test-browser builds it", err)
	}
	return path
}

// program returns the path of a program that hack/setup.sh browser installs.
func program(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range []string{"", "/usr/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path
		}
	}
	t.Fatalf("%s is missing; hack/setup.sh browser installs it", name)
	return ""
}

// start starts a program with its children in a process group, which is killed when the test ends. The channel is closed
// when the program has ended. If the test fails, its output is logged.
func start(t *testing.T, c *exec.Cmd) (ended <-chan struct{}) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = log, log
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Wait() // the log says why
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		<-done
		text, _ := os.ReadFile(log.Name())
		log.Close()
		if t.Failed() {
			t.Logf("output of %s:\n%s", c.Path, text)
		}
	})
	return done
}

// cacheable pushes the greeter with a .proto that declares SayHello free of side effects, and returns the image's name.
func cacheable(t *testing.T) string {
	t.Helper()
	proto := filepath.Join(t.TempDir(), "greeter.proto")
	const method = "rpc SayHello(HelloRequest) returns (HelloReply)"
	text := string(source(t))
	if !strings.Contains(text, method+";") {
		t.Fatalf("greeter.proto has no %q", method)
	}
	text = strings.Replace(text, method+";", method+" { option idempotency_level = NO_SIDE_EFFECTS; }", 1)
	if err := os.WriteFile(proto, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const name = "tripod/wasm/greeter-get:1"
	tripod(t, "push", "--plain-http", filepath.Join(harness.Root(), "examples/wasm/greeter-c/greeter-c.wasm"),
		harness.Registry(t).Addr+"/"+name, "--proto", proto)
	return harness.ImagePrefix + name
}

// source returns the text of greeter.proto.
func source(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Root(), "examples/wasm/greeter/greeter.proto"))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// tripod runs the command line and returns its standard output.
func tripod(t *testing.T, args ...string) string {
	t.Helper()
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), bin, args...)
	var stderr strings.Builder
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("tripod %q: %v: %s", args, err, stderr.String())
	}
	return string(out)
}
