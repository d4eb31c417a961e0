// Command greeter is the Greeter service as an ordinary gRPC server in Go. Only the two lines with tripodgrpc differ from
// a server of grpc-go:
//
//	tripod push . REGISTRY/greeter:1   # as a guest of Tripod
//	go run .                           # natively, on 127.0.0.1:50051
//
// The package greet is what protoc-gen-go and protoc-gen-go-grpc make of ../greeter/greeter.proto.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"example.com/greeter/greet"
	tripodgrpc "github.com/tripod-run/tripod/sdk/go"
)

func main() {
	log.SetFlags(0)
	server := tripodgrpc.NewServer(tripodgrpc.ChainUnaryInterceptor(echoMetadata))
	greet.RegisterGreeterServer(server, &greeter{pod: os.Getenv("POD_NAME")})
	if err := tripodgrpc.Serve(server); err != nil {
		log.Fatal(err)
	}
}

// echoMetadata returns the request's x-request-id in the header, and its x-trace-bin in the trailer.
func echoMetadata(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	for _, id := range md.Get("x-request-id") {
		if err := grpc.SetHeader(ctx, metadata.Pairs("x-request-id", id)); err != nil {
			return nil, err
		}
	}
	for _, trace := range md.Get("x-trace-bin") {
		if err := grpc.SetTrailer(ctx, metadata.Pairs("x-trace-bin", trace)); err != nil {
			return nil, err
		}
	}
	return handler(ctx, request)
}

type greeter struct {
	greet.UnimplementedGreeterServer
	pod string
}

func (g *greeter) greet(name string, language greet.Language) (*greet.HelloReply, error) {
	if name == "" {
		st, err := status.New(codes.InvalidArgument, "name: must not be empty").WithDetails(wrapperspb.String("name"))
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	hello := map[greet.Language]string{greet.Language_LANGUAGE_GERMAN: "Hallo", greet.Language_LANGUAGE_FRENCH: "Bonjour"}[language]
	if hello == "" {
		hello = "Hello"
	}
	return &greet.HelloReply{Message: fmt.Sprintf("%s, %s!", hello, name), ServedBy: g.pod}, nil
}

func (g *greeter) SayHello(ctx context.Context, request *greet.HelloRequest) (*greet.HelloReply, error) {
	client, _ := peer.FromContext(ctx)
	log.Printf("SayHello %s from %v", request.Name, client.Addr)
	return g.greet(request.Name, request.Language)
}

func (g *greeter) Countdown(request *greet.CountdownRequest, stream grpc.ServerStreamingServer[greet.CountdownReply]) error {
	log.Printf("Countdown from %d", request.From)
	for number := int64(request.From); number >= 0; number-- {
		if err := stream.Send(&greet.CountdownReply{Number: uint32(number)}); err != nil {
			return err
		}
		select {
		case <-time.After(time.Duration(request.IntervalMs) * time.Millisecond):
		case <-stream.Context().Done():
			log.Printf("Countdown: %v", stream.Context().Err())
			return stream.Context().Err()
		}
	}
	return nil
}

func (g *greeter) Collect(stream grpc.ClientStreamingServer[greet.HelloRequest, greet.HelloReply]) error {
	var names []string
	var language greet.Language
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		names, language = append(names, request.Name), request.Language
	}
	log.Printf("Collect %s", strings.Join(names, ", "))
	reply, err := g.greet(strings.Join(names, ", "), language)
	if err != nil {
		return err
	}
	return stream.SendAndClose(reply)
}

func (g *greeter) Chat(stream grpc.BidiStreamingServer[greet.HelloRequest, greet.HelloReply]) error {
	log.Print("Chat")
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		reply, err := g.greet(request.Name, request.Language)
		if err != nil {
			return err
		}
		if err := stream.Send(reply); err != nil {
			return err
		}
	}
}
