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

// component is a faults.v1.Faults with a client that speaks the Connect protocol in JSON.
type component struct {
	*harness.Container
	url string
}

// call gives the code of the answer, empty when it was none of an error's. The error is for the connection.
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

// each makes so many calls at a time, which all must end with one of the codes between bars, or with the deadline: its processor
// is slow.
func (f *component) each(t *testing.T, n int, method, message, codes string) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if got, err := f.call(t.Context(), method, message); err != nil || got != "deadline_exceeded" && !slices.Contains(strings.Split(codes, "|"), got) {
				t.Errorf("%s %s: code %q, %v; want %q", method, message, got, err, codes)
			}
		})
	}
	wg.Wait()
}

// lives waits until the attacker itself is served on: what it did has ended its calls, and no more.
func (f *component) lives(t *testing.T) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		code, err := f.call(t.Context(), "Echo", `{"data":"aGk="}`)
		if code != "" {
			err = errors.New(code)
		}
		return err
	})
	if s := f.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %v, want running: %s", s.State, s.Message)
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
			f.each(t, c.atATime, c.method, c.message, c.code)
			f.lives(t)
		})
	}
	// Its clients conspire with it: they ask for what never ends, and do not read it.
	g.attack("clients that do not read", func(t *testing.T) {
		const message = `{"bytes":100000}`
		body := string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))) + message
		for range 64 {
			conn, err := net.DialTimeout("tcp", strings.Split(strings.TrimPrefix(f.url, "http://"), "/")[0], waitLimit)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := fmt.Fprintf(conn, "POST /faults.v1.Faults/Tick HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
				t.Fatal(err)
			}
		}
		// What they hold is the pod's, which may have no room for more, but never the others'.
		for begin := time.Now(); time.Since(begin) < spell; {
			if _, err := f.call(t.Context(), "Echo", `{"data":"aGk="}`); err != nil {
				t.Fatal(err)
			}
		}
	})
	f.lives(t)
}
