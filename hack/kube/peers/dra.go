package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	draName   = "dra.tripod.test"
	draKind   = "dra.tripod.test/device" // of CDI
	draDevice = "only"
)

// driver is a DRA driver. For each claim it writes a CDI file that describes the device.
type driver struct{ node, device string }

func runDRA(ctx context.Context, kubeconfig, root, node, device string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(root, "plugins", draName)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, driver{node, device}, kubeletplugin.DriverName(draName), kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(node), kubeletplugin.RegistrarDirectoryPath(filepath.Join(root, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		return err
	}
	defer helper.Stop()
	devices := []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: draDevice}}}}
	if err := helper.PublishResources(ctx,
		resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: {Slices: devices}}}); err != nil {
		return err
	}
	fmt.Println("published")
	<-ctx.Done()
	return nil
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d driver) PrepareResourceClaims(_ context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		name := string(claim.UID)
		if err := writeCDI(draKind, name, d.device, "/dev/claimed"); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		fmt.Println("prepared", name)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: []kubeletplugin.Device{
			{PoolName: d.node, DeviceName: draDevice, CDIDeviceIDs: []string{draKind + "=" + name}},
		}}
	}
	return results, nil
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		err := os.Remove(cdiFile(string(claim.UID)))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		fmt.Println("unprepared", claim.UID)
		results[claim.UID] = err
	}
	return results, nil
}

// HandleError implements kubeletplugin.DRAPlugin.
func (driver) HandleError(_ context.Context, err error, msg string) {
	fmt.Fprintln(os.Stderr, msg+":", err)
}

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}
