package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/config"
)

// orchestratorFile writes a configuration with an embedded broker and free addresses.
func orchestratorFile(t *testing.T) (file, rest string) {
	t.Helper()
	dir, rest := t.TempDir(), freeAddress(t)
	text := fmt.Sprintf("root = %q\nstate = %q\n[broker]\naddress = %q\n[orchestrator]\naddress = %q\n", filepath.Join(dir, "node"),
		filepath.Join(dir, "state"), freeAddress(t), rest)
	file = filepath.Join(dir, "config.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file, "http://" + rest
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestOrchestratorFlags(t *testing.T) {
	file, _ := orchestratorFile(t)
	s := orchestratorSettings{file: file, embed: true, root: "/srv/o", address: "127.0.0.1:9", logLevel: "warn"}
	c, err := s.load()
	if err != nil {
		t.Fatal(err)
	}
	if o := c.Orchestrator; o.Broker != config.EmbeddedBroker || o.Root != "/srv/o" || o.Address != "127.0.0.1:9" || c.Log.Level != "warn" {
		t.Errorf("with flags the settings are %+v and the log level %q, want those of the flags", o, c.Log.Level)
	}
	for why, args := range map[string][]string{
		"choose one":          {"--embed-broker", "--broker", "mqtt://h"},
		"orchestrator.broker": {"--broker", "http://h"},
		"orchestrator.root":   {"--root", "relative"},
	} {
		code, _, stderr := program(append([]string{"orchestrator", "--config", file}, args...)...)
		if code == 0 || !strings.Contains(stderr, why) {
			t.Errorf("orchestrator %v ended with code %d, want an error that contains %q: %s", args, code, why, stderr)
		}
	}
}

// TestOrchestratorLives runs the orchestrator with the embedded broker twice, with the same record.
func TestOrchestratorLives(t *testing.T) {
	file, rest := orchestratorFile(t)
	s := orchestratorSettings{file: file, embed: true}
	c, err := s.load()
	if err != nil {
		t.Fatal(err)
	}
	for life := range 2 {
		var log bytes.Buffer
		systemd := systemdSocket(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- runOrchestrator(ctx, c, slog.New(slog.NewTextHandler(&log, nil))) }()
		expect(t, systemd, "READY=1\nSTATUS=broker mqtt://"+c.Broker.Address)
		answers(t, rest+"/healthz", `"ok"`)
		answers(t, rest+"/api/runtimes/", `"count":0`)
		answers(t, rest+"/metrics", "tripod_edge_broker_clients 1")
		if life == 0 {
			if err := runOrchestrator(t.Context(), c, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "another") {
				t.Errorf("a second one over the same record: %v", err)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("the orchestrator ended with %v, want no error; its log:\n%s", err, &log)
		}
		expect(t, systemd, "STOPPING=1")
	}
}

// answers waits until a GET returns the text.
func answers(t *testing.T, url, want string) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	last := ""
	for end := time.After(30 * time.Second); ; {
		if resp, err := http.Get(url); err != nil {
			last = err.Error()
		} else {
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if last = string(body); resp.StatusCode == http.StatusOK && strings.Contains(last, want) {
				return
			}
		}
		select {
		case <-end:
			t.Fatalf("GET %s: %s", url, last)
		case <-ticker.C:
		}
	}
}
