// Package linux runs pods as OCI containers by crun or runc, with conmon as each container's monitor.
//
//	node ──▶ Backend                                 <Root>/<pod>/<container>/   the bundle, survives a reboot
//	           │ CreateContainer                         config.json  state.json  rootfs/  volumes/<n>/
//	           │                                         attach  ctl  *.pid           (conmon's)
//	           │ CreateSandbox                       <RunDir>/pods/<pod>/        gone after a reboot
//	           │   a thread unshares ipc and uts,        ns/{ipc,uts,pid}        pins
//	           │   joins the pod's netns, sets host      etc/  shm/              tmpfs of the pod's own
//	           │   name and sysctls, pins, ends          pause/                  PID mode POD only
//	           │                                     <RunDir>/{oci,exits,exec}/  runtime's state, exit codes, execs
//	           │ StartContainer
//	           ├──▶ conmon ──▶ crun create ──▶ init ◀── crun start
//	           │      │ stdio, CRI log, attach socket, exit file; outlives us
//	           │      ▼
//	           ├── pidfds of conmon and of init: the two witnesses of a container's end
//	           └── hub: one connection to the attach socket, shared by all attach clients
//
// Everything is findable from the IDs of pod and container alone: directories, cgroups (tripod-<id>), snapshots
// (linux-<id>), the OCI runtime's state, and conmon by its command line. So each order can be repeated, each removal
// works on half-made things, and recovery needs no memory of what was under way. What lies below our directories and
// cgroup names and is not in the node's record is removed by Recover; nothing else is ever touched.
//
// A container has no process until it is started, and a pod has none unless its containers share a PID namespace,
// which needs an init (docs/adr/0006).
//
// The package must not do networking (the network namespace is given), decide states (the node does), or know how
// images are kept (ImageStore). The OCI specification is made by the package spec below.
package linux
