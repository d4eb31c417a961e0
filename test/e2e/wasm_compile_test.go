package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// compilation is the state of the code of an image's component.
type compilation struct {
	State, Reason, Key, LayerRefused string
}

// compilationOf returns the state of the code of an image's component, from the verbose ImageStatus.
func compilationOf(t *testing.T, d *harness.Daemon, ref string) (c compilation) {
	t.Helper()
	resp, err := d.Images().ImageStatus(context.Background(), &runtimeapi.ImageSpec{Image: ref}, true)
	if err != nil {
		t.Fatal(err)
	}
	info := struct {
		Compilation *compilation `json:"compilation"`
	}{&c}
	if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil {
		t.Fatal(err)
	}
	return c
}

// compileLimit is long, because a compiler for which no pod waits gets little of a busy processor.
const compileLimit = 4 * time.Minute

// waitCompilation waits until the compilation of an image's component has ended, and returns the result.
func waitCompilation(t *testing.T, d *harness.Daemon, ref string) (c compilation) {
	t.Helper()
	harness.Eventually(t, compileLimit, func() error {
		if c = compilationOf(t, d, ref); c.State != "compiled" && c.State != "failed" {
			return fmt.Errorf("compilation of %s: got %+v, want its end", ref, c)
		}
		return nil
	})
	return c
}

// TestWasmCompiledAtPull: a pull compiles the component, and tells it in the image's status, in the events, in the list
// and in the metrics; a pod then starts without a compilation; with the image goes the code.
func TestWasmCompiledAtPull(t *testing.T) {
	address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("metrics.address", address))
	d.Pull(t, harness.GreeterJS)
	if c := waitCompilation(t, d, harness.GreeterJS); c.State != "compiled" {
		t.Fatalf("compilation: got %+v, want compiled", c)
	}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"events"}, []string{"compiling  " + harness.GreeterJS, "compiled   " + harness.GreeterJS}},
		{[]string{"images", "-o", "wide", harness.GreeterJS}, []string{"CODE", "compiled"}},
	} {
		out, err := tripod(t, d, c.args...).CombinedOutput()
		for _, want := range c.want {
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("tripod %s: got error %v and\n%s\nwant %q in it", strings.Join(c.args, " "), err, out, want)
			}
		}
	}
	const one = `tripod_component_compile_duration_seconds_count{code="optimised",result="compiled"} 1`
	if figures := get(t, "http://"+address+"/metrics"); !strings.Contains(figures, one) {
		t.Errorf("metrics have not one compilation:\n%s", figures)
	}
	began := time.Now()
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterJS})
	c.Pod.Remove()
	t.Logf("pod with a compiled component: %v", time.Since(began))
	if figures := get(t, "http://"+address+"/metrics"); !strings.Contains(figures, one) {
		t.Errorf("the pod has compiled again:\n%s", figures)
	}
	removeImage(t, d, harness.GreeterJS)
	harness.Eventually(t, waitLimit, func() error {
		entries, err := os.ReadDir(filepath.Join(d.Root, "wasm", "cache"))
		if err == nil && len(entries) > 0 {
			err = fmt.Errorf("entries of compiled code: got %d, want none", len(entries))
		}
		return err
	})
}

// TestWasmCompilationSurvivesCrash: a daemon that is killed while it compiles leaves no compiler behind, and the next one
// compiles the component again.
func TestWasmCompilationSurvivesCrash(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	d.Pull(t, harness.GreeterJS)
	d.Kill()
	d.Start()
	if c := waitCompilation(t, d, harness.GreeterJS); c.State != "compiled" {
		t.Errorf("compilation: got %+v, want compiled", c)
	}
	startComponent(t, d, harness.GreeterJS, greeter)
}

// TestWasmPullOfBadComponent: a component that cannot run here does not fail the pull. The image's status and the start
// of a pod say why it cannot run.
func TestWasmPullOfBadComponent(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	d.Pull(t, harness.UnknownImportWasm)
	c := waitCompilation(t, d, harness.UnknownImportWasm)
	if c.State != "failed" || !strings.Contains(c.Reason, "nothing provides it") {
		t.Errorf("compilation: got %+v, want failed because of an import", c)
	}
	_, _, err := createIn(t, d, harness.UnknownImportWasm)
	wantCode(t, err, codes.InvalidArgument)
	if err != nil && !strings.Contains(err.Error(), "nothing provides it") {
		t.Errorf("CreateContainer: got %v, want the reason of the compilation", err)
	}
}
