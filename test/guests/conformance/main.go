// Command conformance is a guest that serves connectrpc.conformance.v1.ConformanceService for the public conformance suite
// of Connect, gRPC and gRPC-Web. It answers as each request asks, and reports to the client what it received.
package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	tripodgrpc "github.com/tripod-run/tripod/sdk/go"
	"github.com/tripod-run/tripod/test/guests/conformance/pb"
)

func main() {
	server := tripodgrpc.NewServer()
	pb.RegisterConformanceServiceServer(server, service{})
	if err := tripodgrpc.Serve(server); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type service struct {
	pb.UnimplementedConformanceServiceServer
}

// info returns what was received of a call: its header and deadline, and requests.
func info(ctx context.Context, requests ...proto.Message) (*pb.ConformancePayload_RequestInfo, error) {
	seen := &pb.ConformancePayload_RequestInfo{}
	md, _ := metadata.FromIncomingContext(ctx)
	for name, values := range md {
		h := &pb.Header{Name: name}
		for _, v := range values {
			if strings.HasSuffix(name, "-bin") {
				v = base64.RawStdEncoding.EncodeToString([]byte(v))
			}
			h.Value = append(h.Value, v)
		}
		seen.RequestHeaders = append(seen.RequestHeaders, h)
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline).Round(time.Millisecond).Milliseconds()
		seen.TimeoutMs = &left
	}
	return seen, addRequests(seen, requests...)
}

func addRequests(seen *pb.ConformancePayload_RequestInfo, requests ...proto.Message) error {
	for _, r := range requests {
		a, err := anypb.New(r)
		if err != nil {
			return err
		}
		seen.Requests = append(seen.Requests, a)
	}
	return nil
}

// metadataOf converts headers of a definition. The values of -bin keys are in base64.
func metadataOf(headers []*pb.Header) metadata.MD {
	md := metadata.MD{}
	for _, h := range headers {
		for _, v := range h.Value {
			if strings.HasSuffix(strings.ToLower(h.Name), "-bin") {
				if b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(v, "=")); err == nil {
					v = string(b)
				}
			}
			md.Append(h.Name, v)
		}
	}
	return md
}

// failure returns the status that an error asks for, with what was received as a detail unless it is nil.
func failure(e *pb.Error, seen *pb.ConformancePayload_RequestInfo) error {
	st := status.New(codes.Code(e.Code), e.GetMessage()).Proto()
	st.Details = e.Details
	if seen != nil {
		a, err := anypb.New(seen)
		if err != nil {
			return err
		}
		st.Details = append(st.Details, a)
	}
	return status.ErrorProto(st)
}

func wait(ctx context.Context, milliseconds uint32) error {
	if milliseconds == 0 {
		return nil
	}
	select {
	case <-time.After(time.Duration(milliseconds) * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// single makes the one response of a call.
func single(ctx context.Context, d *pb.UnaryResponseDefinition, requests ...proto.Message) (*pb.ConformancePayload, error) {
	seen, err := info(ctx, requests...)
	if err == nil {
		err = errors.Join(grpc.SetHeader(ctx, metadataOf(d.GetResponseHeaders())), grpc.SetTrailer(ctx, metadataOf(d.GetResponseTrailers())))
	}
	if err == nil {
		err = wait(ctx, d.GetResponseDelayMs())
	}
	if err != nil {
		return nil, err
	}
	if e := d.GetError(); e != nil {
		return nil, failure(e, seen)
	}
	return &pb.ConformancePayload{Data: d.GetResponseData(), RequestInfo: seen}, nil
}

func (service) Unary(ctx context.Context, r *pb.UnaryRequest) (*pb.UnaryResponse, error) {
	p, err := single(ctx, r.ResponseDefinition, r)
	if err != nil {
		return nil, err
	}
	return &pb.UnaryResponse{Payload: p}, nil
}

func (service) IdempotentUnary(ctx context.Context, r *pb.IdempotentUnaryRequest) (*pb.IdempotentUnaryResponse, error) {
	p, err := single(ctx, r.ResponseDefinition, r)
	if err != nil {
		return nil, err
	}
	return &pb.IdempotentUnaryResponse{Payload: p}, nil
}

func (service) ClientStream(stream grpc.ClientStreamingServer[pb.ClientStreamRequest, pb.ClientStreamResponse]) error {
	var requests []proto.Message
	var definition *pb.UnaryResponseDefinition
	for {
		r, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if len(requests) == 0 {
			definition = r.ResponseDefinition
		}
		requests = append(requests, r)
	}
	p, err := single(stream.Context(), definition, requests...)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&pb.ClientStreamResponse{Payload: p})
}

// begin sets the metadata of a call that streams its responses. If it can, it sends the header at once, before any delay.
func begin(stream grpc.ServerStream, d *pb.StreamResponseDefinition, atOnce bool) error {
	stream.SetTrailer(metadataOf(d.GetResponseTrailers()))
	if len(d.GetResponseData()) == 0 || !atOnce {
		return stream.SetHeader(metadataOf(d.GetResponseHeaders()))
	}
	return stream.SendHeader(metadataOf(d.GetResponseHeaders()))
}

// several sends the responses of a definition from a number on, the first with what was received, and then fails if the
// definition asks for it.
func several(ctx context.Context, d *pb.StreamResponseDefinition, from int, seen *pb.ConformancePayload_RequestInfo,
	send func(*pb.ConformancePayload) error) error {
	for n := from; n < len(d.GetResponseData()); n++ {
		if err := wait(ctx, d.ResponseDelayMs); err != nil {
			return err
		}
		if err := send(&pb.ConformancePayload{Data: d.ResponseData[n], RequestInfo: seen}); err != nil {
			return err
		}
		seen = nil
	}
	if d.GetError() != nil {
		return failure(d.Error, seen)
	}
	return nil
}

func (service) ServerStream(r *pb.ServerStreamRequest, stream grpc.ServerStreamingServer[pb.ServerStreamResponse]) error {
	seen, err := info(stream.Context(), r)
	if err != nil {
		return err
	}
	if err := begin(stream, r.ResponseDefinition, true); err != nil {
		return err
	}
	return several(stream.Context(), r.ResponseDefinition, 0, seen, func(p *pb.ConformancePayload) error {
		return stream.Send(&pb.ServerStreamResponse{Payload: p})
	})
}

func (service) BidiStream(stream grpc.BidiStreamingServer[pb.BidiStreamRequest, pb.BidiStreamResponse]) error {
	first, err := stream.Recv()
	if err == io.EOF {
		return nil
	}
	if err != nil {
		return err
	}
	d, ctx := first.ResponseDefinition, stream.Context()
	// A half-duplex call over HTTP/1.1 must not answer before the end of its request.
	if err := begin(stream, d, first.FullDuplex); err != nil {
		return err
	}
	seen, err := info(ctx, first)
	if err != nil {
		return err
	}
	send := func(p *pb.ConformancePayload) error { return stream.Send(&pb.BidiStreamResponse{Payload: p}) }
	sent := 0
	for {
		if first.FullDuplex {
			if sent >= len(d.GetResponseData()) {
				break
			}
			if err := wait(ctx, d.ResponseDelayMs); err != nil {
				return err
			}
			if err := send(&pb.ConformancePayload{Data: d.ResponseData[sent], RequestInfo: seen}); err != nil {
				return err
			}
			sent++
			seen = nil
		}
		r, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if seen == nil {
			seen = &pb.ConformancePayload_RequestInfo{}
		}
		if err := addRequests(seen, r); err != nil {
			return err
		}
	}
	if first.FullDuplex && sent > 0 && sent >= len(d.GetResponseData()) {
		seen = nil
	}
	return several(ctx, d, sent, seen, send)
}
