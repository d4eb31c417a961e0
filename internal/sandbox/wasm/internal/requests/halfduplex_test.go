package requests

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/test/until"
)

// TestHalfDuplex checks that a bidirectional stream over HTTP/1.1 passes the node complete, although the container
// replies before the request ends.
func TestHalfDuplex(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#5")
	request := &pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: make([]byte, 30_000)}}
	b, err := proto.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	const n = 30
	message := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
	response, err := http.Post("http://"+r.clearAddress+"/grpc.testing.TestService/FullDuplexCall", "application/connect+proto",
		io.MultiReader(bytes.NewReader(bytes.Repeat(message, n))))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || len(answer) < n*len(message) || !bytes.Contains(answer, []byte("data_loss")) {
		t.Errorf("answer = %s, %d bytes, %v; want %d messages and the status", response.Status, len(answer), err, n)
	}
}

// unread returns how many bytes the peer of a connection over IPv4 on this host has received and not read.
func unread(t *testing.T, conn net.Conn) (n uint64) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/tcp") // proc_net_tcp.txt of the Linux kernel
	if err != nil {
		t.Fatal(err)
	}
	port := func(a net.Addr) string { return fmt.Sprintf(":%04X", a.(*net.TCPAddr).Port) }
	for line := range strings.Lines(string(b)) {
		// sl local_address rem_address st tx_queue:rx_queue …
		if f := strings.Fields(line); strings.HasSuffix(f[1], port(conn.RemoteAddr())) && strings.HasSuffix(f[2], port(conn.LocalAddr())) {
			_, queue, _ := strings.Cut(f[4], ":")
			if n, err = strconv.ParseUint(queue, 16, 64); err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("the node has no such connection")
	return 0
}

// TestHalfDuplexUnread checks that the node keeps nothing of a request whose response is complete.
func TestHalfDuplexUnread(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#1")
	for range 20 { // the response can be complete before the node has returned its header
		conn, err := net.Dial("tcp", r.clearAddress)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		const size = 1 << 20 // bytes
		head := fmt.Sprintf("POST /grpc.testing.TestService/HalfDuplexCall HTTP/1.1\r\nHost: a\r\nContent-Type: application/connect+proto\r\nContent-Length: %d\r\n\r\n", size)
		if _, err := conn.Write(append([]byte(head), make([]byte, size-1)...)); err != nil {
			t.Fatal(err)
		}
		until.Holds(t, "the node has read what it has been sent", func() bool { return unread(t, conn) == 0 })
		until.Within(t, 10*time.Second, "the node keeps nothing", func() bool {
			const nearly = dataplane.AheadMemory - 64<<10 // a Read in progress keeps its buffer
			free := r.router.ahead.TryAcquire(nearly)
			if free {
				r.router.ahead.Release(nearly)
			}
			return free
		})
		if _, err := conn.Write([]byte{0}); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK || !bytes.Contains(answer, []byte("unimplemented")) {
			t.Errorf("answer = %s, %q, %v; want the component's status", response.Status, answer, err)
		}
	}
}

// TestHalfDuplexLimit checks that the node answers 505 if a request leaves too much when its response begins.
func TestHalfDuplexLimit(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#1")
	response, err := http.Post("http://"+r.clearAddress+"/grpc.testing.TestService/FullDuplexCall", "application/connect+proto",
		bytes.NewReader(make([]byte, maxAhead+2<<20)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusHTTPVersionNotSupported || !bytes.Contains(answer, []byte("HTTP/3")) {
		t.Errorf("answer = %s, %.100q, %v; want 505", response.Status, answer, err)
	}
}
