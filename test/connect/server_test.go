package connect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Environment variables from the test for the servers that the runner starts.
const (
	envSocket = "TRIPOD_CONNECT_SOCKET" // of the daemon's CRI
	envImage  = "TRIPOD_CONNECT_IMAGE"
	envDir    = "TRIPOD_CONNECT_DIR" // for certificates
)

// request is the runner's ServerCompatRequest.
type request struct {
	tls              bool
	clientCA         []byte
	limit            uint64 // bytes of a message; 0: none
	certificate, key []byte
}

// readMessage reads one message from the runner: its length in four bytes, then its content.
func readMessage(from io.Reader) ([]byte, error) {
	var length uint32
	if err := binary.Read(from, binary.BigEndian, &length); err != nil {
		return nil, err
	}
	message := make([]byte, min(length, 1<<20))
	_, err := io.ReadFull(from, message)
	return message, err
}

// fields calls f with the fields of a message. n is the value of a varint.
func fields(message []byte, f func(number protowire.Number, n uint64, bytes []byte) error) error {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return protowire.ParseError(size)
		}
		message = message[size:]
		size = protowire.ConsumeFieldValue(number, kind, message)
		if size < 0 {
			return protowire.ParseError(size)
		}
		var n uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			n, _ = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			bytes, _ = protowire.ConsumeBytes(message)
		}
		if err := f(number, n, bytes); err != nil {
			return err
		}
		message = message[size:]
	}
	return nil
}

// parse decodes a ServerCompatRequest. It ignores the protocol and the HTTP version, because a pod serves all of them.
func parse(message []byte) (w request, err error) {
	err = fields(message, func(number protowire.Number, n uint64, bytes []byte) error {
		switch number {
		case 4:
			w.tls = n != 0
		case 5:
			w.clientCA = bytes
		case 6:
			w.limit = n
		case 7:
			return fields(bytes, func(number protowire.Number, _ uint64, bytes []byte) error {
				switch number {
				case 1:
					w.certificate = bytes
				case 2:
					w.key = bytes
				}
				return nil
			})
		}
		return nil
	})
	return w, err
}

// answer encodes the ServerCompatResponse.
func answer(port int, certificate []byte) []byte {
	var m []byte
	m = protowire.AppendString(protowire.AppendTag(m, 1, protowire.BytesType), "127.0.0.1")
	m = protowire.AppendVarint(protowire.AppendTag(m, 2, protowire.VarintType), uint64(port))
	if certificate != nil {
		m = protowire.AppendBytes(protowire.AppendTag(m, 3, protowire.BytesType), certificate)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(m))), m...)
}

// freePort returns a port that is free for TCP and UDP.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	u, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
	if err != nil {
		return 0, err
	}
	return port, u.Close()
}

// serve runs a pod as a server of the suite until the runner ends this process.
func serve() error {
	message, err := readMessage(os.Stdin)
	if err != nil {
		return err
	}
	w, err := parse(message)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix://"+os.Getenv(envSocket), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	p := &pod{cri: runtimeapi.NewRuntimeServiceClient(conn), name: "server-" + strconv.Itoa(os.Getpid())}
	defer p.remove()
	port, err := p.run(ctx, w)
	if err != nil {
		return err
	}
	if _, err := os.Stdout.Write(answer(port, w.certificate)); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// pod is a pod with the component, in the network of the node.
type pod struct {
	cri      runtimeapi.RuntimeServiceClient
	name, id string
}

// run starts the pod and returns the port for the runner to call.
func (p *pod) run(ctx context.Context, w request) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	overTLS, err1 := freePort()
	cleartext, err2 := freePort()
	if err := errors.Join(err1, err2); err != nil {
		return 0, err
	}
	annotations := map[string]string{"vimana.host/port": strconv.Itoa(overTLS), "vimana.host/cleartext-port": strconv.Itoa(cleartext)}
	if w.limit > 0 {
		annotations["vimana.host/max-message-bytes"] = strconv.FormatUint(w.limit, 10)
	}
	container := &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "c"},
		Image: &runtimeapi.ImageSpec{Image: os.Getenv(envImage)}, LogPath: "c.log", Linux: &runtimeapi.LinuxContainerConfig{}}
	port := cleartext
	if w.tls {
		dir := filepath.Join(os.Getenv(envDir), p.name)
		if err := writeIdentity(dir, w); err != nil {
			return 0, err
		}
		port = overTLS
		annotations["vimana.host/tls"] = "/tls"
		container.Mounts = []*runtimeapi.Mount{{HostPath: dir, ContainerPath: "/tls", Readonly: true}}
		if w.clientCA != nil {
			annotations["vimana.host/client-auth"] = "require"
		}
	}
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: p.name, Uid: p.name, Namespace: "test"}, Annotations: annotations,
		LogDirectory: filepath.Join(os.Getenv(envDir), p.name+".logs"),
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}
	sandbox, err := p.cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: "wasm"})
	if err != nil {
		return 0, err
	}
	p.id = sandbox.PodSandboxId
	created, err := p.cri.CreateContainer(ctx,
		&runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: container, SandboxConfig: config})
	if err != nil {
		return 0, err
	}
	_, err = p.cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: created.ContainerId})
	return port, err
}

// writeIdentity writes the files of a mounted Secret of type kubernetes.io/tls.
func writeIdentity(dir string, w request) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	files := map[string][]byte{"tls.crt": w.certificate, "tls.key": w.key}
	if w.clientCA != nil {
		files["ca.crt"] = w.clientCA
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (p *pod) remove() {
	if p.id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err1 := p.cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
	_, err2 := p.cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.id})
	if err := errors.Join(err1, err2); err != nil {
		fmt.Fprintln(os.Stderr, "remove the pod:", err)
	}
}
