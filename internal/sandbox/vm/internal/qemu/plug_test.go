package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestPlugGivesUp: QEMU does not keep the file of a disk whose caller went away before the disk was plugged in.
func TestPlugGivesUp(t *testing.T) {
	for range 50 { // a command whose context has ended is sent sometimes
		plugGivesUp(t)
	}
}

func plugGivesUp(t *testing.T) {
	t.Helper()
	ctx, giveUp := context.WithCancel(t.Context())
	r := &run{socket: filepath.Join(t.TempDir(), "monitor"), proc: &process.Process{Dead: make(chan struct{})}, connected: make(chan struct{})}
	listener, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	executed := make(chan []string, 1)
	go func() {
		var commands []string
		defer func() { executed <- commands }()
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprintln(conn, `{"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 0}}, "capabilities": []}}`)
		for in := bufio.NewScanner(conn); in.Scan(); {
			var request struct {
				Execute string
				ID      uint64
			}
			if json.Unmarshal(in.Bytes(), &request) != nil {
				return
			}
			commands = append(commands, request.Execute)
			answer := "{}"
			switch request.Execute {
			case "query-named-block-nodes":
				answer = "[]"
			case "add-fd":
				answer = `{"fdset-id": 5, "fd": 7}`
			case "blockdev-add":
				giveUp()
				continue
			}
			fmt.Fprintf(conn, `{"return": %s, "id": %d}`+"\n", answer, request.ID)
		}
	}()
	if err := r.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := r.plugNode(ctx, "plug0", machine.PlugDisk{File: file, ReadOnly: true}); !errors.Is(err, context.Canceled) {
		t.Errorf("error: got %v, want that the caller went away", err)
	}
	r.disconnected()
	if commands := <-executed; !slices.Contains(commands, "remove-fd") {
		t.Errorf("commands: got %q, want remove-fd, too", commands)
	}
}
