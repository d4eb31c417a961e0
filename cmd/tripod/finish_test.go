package main

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// talkative sends events as long as a client is connected, and answers Version on request.
type talkative struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	called, answer chan struct{}
}

func (s *talkative) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	event := &runtimeapi.ContainerEventResponse{ContainerId: strings.Repeat("a", 32<<10)}
	for {
		if err := stream.Send(event); err != nil {
			return err
		}
	}
}

func (s *talkative) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	close(s.called)
	<-s.answer
	return &runtimeapi.VersionResponse{}, nil
}

// TestFaultN10ListenerThatNeverReads: when it stops, the daemon waits for a call in progress, but not for a subscriber
// that does not read.
func TestFaultN10ListenerThatNeverReads(t *testing.T) {
	draining, drain := context.WithCancel(t.Context())
	var calls calls
	server := grpc.NewServer(grpc.ChainStreamInterceptor(endWith(draining)), grpc.ChainUnaryInterceptor(calls.count))
	service := &talkative{called: make(chan struct{}), answer: make(chan struct{})}
	runtimeapi.RegisterRuntimeServiceServer(server, service)
	socket := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := runtimeapi.NewRuntimeServiceClient(conn)
	stream, err := client.GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil { // the only event that is read
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := client.Version(t.Context(), &runtimeapi.VersionRequest{})
		answered <- err
	}()
	<-service.called

	drain()
	finished, began := make(chan struct{}), time.Now()
	go func() {
		defer close(finished)
		finish(server, &calls, time.Hour, slog.New(slog.DiscardHandler))
	}()
	select {
	case <-finished:
		t.Error("the call under way was not waited for")
	case <-time.After(lastWords + 200*time.Millisecond):
	}
	close(service.answer)
	if err := <-answered; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	select {
	case <-finished:
	case <-time.After(10 * time.Second):
		t.Fatalf("not finished after %v", time.Since(began))
	}
}
