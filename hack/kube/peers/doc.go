// Command peers is what a kubelet meets on a node besides the runtime, for the tests in test/kubelet: a device plugin, a DRA
// driver and systemd's login manager. They hold what they say to the kubelet's own interfaces, from Kubernetes' modules,
// which are not dependencies of the product. Begin with main.
//
//	peers logind SOCKET                       org.freedesktop.login1 on the bus at SOCKET; see logind.go for its input
//	peers device-plugin                       the resource tripod.test/gadget, with two devices
//	peers dra KUBECONFIG ROOT NODE DEVICE     the DRA driver dra.tripod.test, with one device: a device node
//
// ROOT is the kubelet's root directory. Each prints a line for what happens, and runs until it gets a signal.
package main
