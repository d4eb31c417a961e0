// Command caller is a guest that serves the service of the public gRPC interop tests by calling another server of it, whose
// target is in the environment variable UPSTREAM: http://HOST:PORT or https://HOST:PORT. Metadata, messages and statuses
// pass in both directions.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"io"
	"log"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	tripodgrpc "github.com/tripod-run/tripod/sdk/go"
)

func main() {
	log.SetFlags(0)
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	scheme, host, _ := strings.Cut(os.Getenv("UPSTREAM"), "://")
	security := insecure.NewCredentials()
	if scheme == "https" {
		security = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13})
	}
	conn, err := tripodgrpc.NewClient(cmp.Or(host, "unset:1"), tripodgrpc.WithTransportCredentials(security))
	if err != nil {
		return err
	}
	defer conn.Close()
	server := tripodgrpc.NewServer()
	pb.RegisterTestServiceServer(server, &caller{upstream: pb.NewTestServiceClient(conn)})
	return tripodgrpc.Serve(server)
}

type caller struct {
	pb.UnimplementedTestServiceServer
	upstream pb.TestServiceClient
}

// outgoing passes on the metadata of the caller's client.
func outgoing(ctx context.Context) context.Context {
	in, _ := metadata.FromIncomingContext(ctx)
	return metadata.NewOutgoingContext(ctx, in)
}

// unary makes a unary call and passes on its metadata.
func unary[Request, Reply any](ctx context.Context, r Request,
	call func(context.Context, Request, ...grpc.CallOption) (Reply, error)) (reply Reply, err error) {
	var header, trailer metadata.MD
	if reply, err = call(outgoing(ctx), r, grpc.Header(&header), grpc.Trailer(&trailer)); err == nil {
		err = grpc.SetHeader(ctx, header)
	}
	if late := grpc.SetTrailer(ctx, trailer); err == nil {
		err = late
	}
	return reply, err
}

func (c *caller) EmptyCall(ctx context.Context, r *pb.Empty) (*pb.Empty, error) {
	return unary(ctx, r, c.upstream.EmptyCall)
}

func (c *caller) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return unary(ctx, r, c.upstream.UnaryCall)
}

func (c *caller) StreamingOutputCall(r *pb.StreamingOutputCallRequest, s pb.TestService_StreamingOutputCallServer) error {
	up, err := c.upstream.StreamingOutputCall(outgoing(s.Context()), r)
	if err != nil {
		return err
	}
	return back(s, up, new(pb.StreamingOutputCallResponse), true)
}

func (c *caller) StreamingInputCall(s pb.TestService_StreamingInputCallServer) error {
	up, err := c.upstream.StreamingInputCall(outgoing(s.Context()))
	if err != nil {
		return err
	}
	return both(s, up, new(pb.StreamingInputCallRequest), new(pb.StreamingInputCallResponse), false)
}

func (c *caller) FullDuplexCall(s pb.TestService_FullDuplexCallServer) error {
	up, err := c.upstream.FullDuplexCall(outgoing(s.Context()))
	if err != nil {
		return err
	}
	return both(s, up, new(pb.StreamingOutputCallRequest), new(pb.StreamingOutputCallResponse), true)
}

// both passes on messages in both directions.
func both(s grpc.ServerStream, up grpc.ClientStream, request, response proto.Message, many bool) error {
	go func() {
		for s.RecvMsg(request) == nil && up.SendMsg(request) == nil {
		}
		_ = up.CloseSend()
	}()
	return back(s, up, response, many)
}

// back passes on what the server sends, which is one message or many.
func back(s grpc.ServerStream, up grpc.ClientStream, response proto.Message, many bool) error {
	if header, err := up.Header(); err == nil && header != nil {
		if err := s.SendHeader(header); err != nil {
			return err
		}
	}
	defer func() { s.SetTrailer(up.Trailer()) }()
	for {
		err := up.RecvMsg(response)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.SendMsg(response); err != nil || !many {
			return err
		}
	}
}
