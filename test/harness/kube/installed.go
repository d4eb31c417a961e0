package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
)

// On a host with Tripod's package (harness.Installed), the cluster has one node, which is the host: its namespaces, its
// tripod.service, and a unit for each other program.

// startUnit starts a program as a scope, so that it has its own cgroup, and is still a child that takes signals.
func startUnit(cmd *exec.Cmd) error {
	name := filepath.Base(cmd.Args[0])
	run := exec.Command("systemd-run",
		slices.Concat([]string{"--scope", "--quiet", "--collect", "--slice=kubernetes", "--unit=" + name}, cmd.Args)...)
	cmd.Path, cmd.Args = run.Path, run.Args
	return errors.Join(run.Err, cmd.Start())
}

// followService makes the daemon's program the reader of the service's journal, so that the daemon has a log like the
// others.
func (n *Node) followService() {
	n.Daemon.argv = []string{"journalctl", "--unit=tripod", "--lines=0", "--follow", "--output=cat"}
}

func removeLink() error {
	link, err := netlink.LinkByName(bridgeName)
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

// unitName is a pod's UID in the names of units, where a hyphen separates levels.
func unitName(uid string) string { return strings.ReplaceAll(uid, "-", "_") }

// unitLeaks returns an error that names the units that systemd still has for a pod.
func unitLeaks(uid string) error {
	units, err := output(exec.Command("systemctl", "list-units", "--all", "--plain", "--no-legend", "*"+unitName(uid)+"*"))
	if err == nil && units != "" {
		err = fmt.Errorf("units: %s", units)
	}
	return err
}

// CgroupOf returns the path of the cgroup of a pod's only container, as Tripod reports it. A component without a worker
// of its own has none.
func (n *Namespace) CgroupOf(pod *corev1.Pod) (string, error) {
	_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
	text, err := n.Cluster.Tripod("inspect", id)
	if err != nil {
		return "", err
	}
	var about struct {
		Info struct {
			Info struct{ Cgroup string }
		}
	}
	return about.Info.Info.Cgroup, json.Unmarshal([]byte(text), &about)
}
