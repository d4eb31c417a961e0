package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"time"

	"github.com/quic-go/quic-go/http3"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// echoPort is the port of the bare handler, which must differ from the component's ports.
const echoPort = 8443

// serveEcho implements `wasmbench echo NETNS`: it runs the bare handler in a network namespace until it is killed.
func serveEcho(netns string) error {
	fd, err := netthread.Open(netns)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var socket net.PacketConn
	err = netthread.In(fd, func() (err error) {
		socket, err = net.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", echoPort))
		return err
	})
	if err != nil {
		return err
	}
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	server := &http3.Server{
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate}}),
		Handler:   http.HandlerFunc(bareEcho),
	}
	fmt.Println("ready")
	return server.Serve(socket)
}

// bareEcho answers like gRPC's Echo, without parsing the request.
func bareEcho(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.WriteHeader(http.StatusOK)
	_, _ = io.Copy(w, r.Body)
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// startEcho runs the bare handler in a separate process, because a component also runs in a separate process. The
// returned function ends the process.
func startEcho(ctx context.Context, netns string) (stop func(), err error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "echo", netns)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		stop()
		return nil, fmt.Errorf("start the bare handler: %w", err)
	}
	return stop, nil
}
