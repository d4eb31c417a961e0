package attack

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// faulty runs examples/wasm/faults-c with the limits of an attacker.
func (g *ground) faulty(t *testing.T) *component {
	t.Helper()
	c := g.d.RunWasm(t, &harness.PodSpec{
		Name: "attacker-wasm", Image: harness.FaultsC,
		Pod: []harness.PodOption{func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations = map[string]string{"vimana.host/request-timeout": "1s"}
		}},
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: podMemory, CpuQuota: 50_000, CpuPeriod: 100_000}
		}},
	})
	f := &component{c, "http://" + net.JoinHostPort(c.Pod.IP(), "80") + "/faults.v1.Faults/"}
	harness.Eventually(t, waitLimit, func() error {
		_, err := f.call(t.Context(), "Echo", `{}`)
		return err
	})
	return f
}

// component is a running faults.v1.Faults with a client that speaks the Connect protocol in JSON.
type component struct {
	*harness.Container
	url string
}

// call returns the error code in the answer, or "" for a success. err is an error of the connection.
func (f *component) call(ctx context.Context, method, message string) (code string, err error) {
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+method, strings.NewReader(message))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode == http.StatusOK {
		return "", err
	}
	var failure struct{ Code string }
	if err := json.Unmarshal(body, &failure); err != nil {
		return "", fmt.Errorf("%s: %q", resp.Status, body)
	}
	return failure.Code, nil
}

// callAll makes n concurrent calls. Each must end with one of the codes, which are separated by bars, or with
// deadline_exceeded, because the component gets little CPU time.
func (f *component) callAll(t *testing.T, n int, method, message, codes string) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if got, err := f.call(t.Context(), method, message); err != nil ||
				got != "deadline_exceeded" && !slices.Contains(strings.Split(codes, "|"), got) {
				t.Errorf("%s %s: got code %q, error %v; want code %q", method, message, got, err, codes)
			}
		})
	}
	wg.Wait()
}

// wantServing waits until the attacker's own calls succeed again, and checks that its container is running.
func (f *component) wantServing(t *testing.T) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		code, err := f.call(t.Context(), "Echo", `{"data":"aGk="}`)
		if code != "" {
			err = errors.New(code)
		}
		return err
	})
	if s := f.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("state of the container: got %v (%s), want running", s.State, s.Message)
	}
}

func TestComponent(t *testing.T) {
	g := open(t)
	var f *component
	g.Run("start", func(*testing.T) { f = g.faulty(g.T) })
	for _, c := range []struct {
		name, method, message, code string
		atATime                     int
	}{
		{"endless loop", "Spin", `{}`, "deadline_exceeded", 20},
		{"deep recursion", "Recurse", `{}`, "internal", 20},
		{"more than its memory", "Allocate", `{"value":"2000000000"}`, "resource_exhausted", 4},
		{"all of its memory", "Grow", `{"value":"2000000000"}`, "|resource_exhausted", 4},
		{"trap", "Trap", `{"kind":"OUT_OF_BOUNDS"}`, "internal", 20},
		{"exit", "Exit", `{"value":"3"}`, "internal", 20},
		{"headers", "Headers", `{"value":"1000000"}`, "resource_exhausted", 4},
		{"log", "Print", `{"stdout":"` + strings.Repeat("x", 1000) + `\n","times":1000}`, "", 4},
		{"files outside", "ReadFile", `{"path":"/proc/self/environ"}`, "not_found", 4},
	} {
		g.attack(c.name, func(t *testing.T) {
			f.callAll(t, c.atATime, c.method, c.message, c.code)
			f.wantServing(t)
		})
	}
	// The component's clients are accomplices: they request endless streams and do not read them.
	g.attack("clients that do not read", func(t *testing.T) {
		const message = `{"bytes":100000}`
		body := string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))) + message
		for range 64 {
			conn, err := net.DialTimeout("tcp", strings.Split(strings.TrimPrefix(f.url, "http://"), "/")[0], waitLimit)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := fmt.Fprintf(conn,
				"POST /faults.v1.Faults/Tick HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n%s", len(body),
				body); err != nil {
				t.Fatal(err)
			}
		}
		// The clients can exhaust the pod's own resources, but not those of other pods.
		for begin := time.Now(); time.Since(begin) < caseTime; {
			if _, err := f.call(t.Context(), "Echo", `{"data":"aGk="}`); err != nil {
				t.Fatal(err)
			}
		}
	})
	f.wantServing(t)
}
