package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	gadgetResource = "tripod.test/gadget"
	gadgetKind     = "tripod.test/gadget" // of CDI
)

var gadgets = []string{"gadget-0", "gadget-1"}

// gadgetPlugin is a device plugin. A container with a gadget gets a device node and a variable by the plugin's answer, and
// another device node, a variable and a file by CDI.
type gadgetPlugin struct {
	deviceplugin.UnimplementedDevicePluginServer
	done <-chan struct{}
}

func runDevicePlugin(ctx context.Context) error {
	for _, name := range gadgets {
		if err := writeCDI(gadgetKind, name, "/dev/zero", "/dev/"+name); err != nil {
			return err
		}
		defer os.Remove(cdiFile(name))
	}
	socket := filepath.Join(deviceplugin.DevicePluginPath, "gadget.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	deviceplugin.RegisterDevicePluginServer(server, gadgetPlugin{done: ctx.Done()})
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(listener) }()
	defer server.Stop()
	if err := registerPlugin(ctx, filepath.Base(socket)); err != nil {
		return err
	}
	fmt.Println("registered")
	select {
	case err := <-serving:
		return err
	case <-ctx.Done():
		return nil
	}
}

func registerPlugin(ctx context.Context, endpoint string) error {
	conn, err := grpc.NewClient("unix:"+deviceplugin.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = deviceplugin.NewRegistrationClient(conn).Register(ctx, &deviceplugin.RegisterRequest{
		Version: deviceplugin.Version, Endpoint: endpoint, ResourceName: gadgetResource,
	})
	return err
}

func (gadgetPlugin) GetDevicePluginOptions(context.Context, *deviceplugin.Empty) (*deviceplugin.DevicePluginOptions, error) {
	return &deviceplugin.DevicePluginOptions{}, nil
}

func (p gadgetPlugin) ListAndWatch(_ *deviceplugin.Empty, stream deviceplugin.DevicePlugin_ListAndWatchServer) error {
	list := &deviceplugin.ListAndWatchResponse{}
	for _, name := range gadgets {
		list.Devices = append(list.Devices, &deviceplugin.Device{ID: name, Health: deviceplugin.Healthy})
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	select {
	case <-stream.Context().Done():
	case <-p.done:
	}
	return nil
}

func (gadgetPlugin) Allocate(_ context.Context, req *deviceplugin.AllocateRequest) (*deviceplugin.AllocateResponse, error) {
	resp := &deviceplugin.AllocateResponse{}
	for _, c := range req.ContainerRequests {
		answer := &deviceplugin.ContainerAllocateResponse{
			Envs:    map[string]string{"GADGETS": strings.Join(c.DevicesIds, ",")},
			Devices: []*deviceplugin.DeviceSpec{{HostPath: "/dev/zero", ContainerPath: "/dev/gadget", Permissions: "r"}},
		}
		for _, id := range c.DevicesIds {
			answer.CdiDevices = append(answer.CdiDevices, &deviceplugin.CDIDevice{Name: gadgetKind + "=" + id})
		}
		fmt.Println("allocated", c.DevicesIds)
		resp.ContainerResponses = append(resp.ContainerResponses, answer)
	}
	return resp, nil
}
