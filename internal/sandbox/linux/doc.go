// Package linux runs pods as OCI containers with crun or runc, and a conmon that monitors each container.
//
//	node ──▶ Backend                                 <Root>/<pod>/<container>/   the bundle, survives a reboot
//	           │ CreateContainer                         config.json  state.json  rootfs/  volumes/<n>/
//	           │                                         attach  ctl  *.pid           (conmon's)
//	           │ CreateSandbox                       <RunDir>/pods/<pod>/        gone after a reboot
//	           │   a thread unshares ipc and uts,        ns/{ipc,uts,pid}        pins
//	           │   joins the pod's netns, sets host      etc/  shm/              the pod's own tmpfs
//	           │   name and sysctls, pins, exits         pause/                  PID mode POD only
//	           │                                     <RunDir>/{oci,exits,exec}/  runtime's state, exit codes, execs
//	           │ StartContainer
//	           ├──▶ conmon ──▶ crun create ──▶ init ◀── crun start
//	           │      │ stdio, CRI log, attach socket, exit file; outlives us
//	           │      ▼
//	           ├── pidfds of conmon and of init: the container has ended when either process exits
//	           └── hub: one connection to the attach socket, shared by all attach clients
//
// Everything can be found from the IDs of the pod and the container: directories, cgroups (tripod-<id>), snapshots
// (linux-<id>), the OCI runtime's state, and conmon by its command line. So every order can be repeated, removal works
// on partly created containers, and recovery needs no other record. Recover removes only things that have one of our
// names and are not in the node's record.
//
// A container has no process until it is started, and a pod has no process of its own unless its containers share a PID
// namespace, which needs an init process (docs/adr/0006).
//
// The package must not set up networking (it receives the network namespace), decide states (the node does), or know
// how images are stored (ImageStore).
//
// # Subpackages
//
//	internal/spec       builds the OCI specification of a container
//	internal/oci        runs containers with crun or runc and conmon
//	internal/apparmor   loads the default AppArmor profile, and finds which profiles the kernel has
//	internal/selinux    assigns SELinux labels to pods and containers, and relabels volumes
//	internal/shared     makes what the containers of a pod share: namespaces, the files for /etc, and /dev/shm
//	internal/mnt        makes and removes mounts: layers and views of images, tmpfs, and mapped clones
//	internal/notifier   reports the system calls that a container's seccomp profile forbids
package linux
