// Package fdpass passes open files between processes over a unix socket (SCM_RIGHTS, unix(7)): frames, and a service of one
// request and one reply.
//
//	tripod-vmwrap ──{request}──▶ Server ──Handler──▶ the libvirt driver: taps, disks, sockets of one machine
//	              ◀──{reply}+files──
//	daemon ◀──frames──▶ tripod-wasm worker          internal/sandbox/wasm/internal/workerapi, which has messages of its own
//
// A frame is a header of 8 bytes and a message; the header is the length of the message and the number of file descriptors
// that travel with the frame, both uint32, big endian. A received file belongs to the Frame until the caller takes it, and is
// otherwise closed with the Frame or the Reader.
//
// The package knows nothing about what is passed. Whom to trust is the Handler's decision; the kernel tells it who asks (Peer).
package fdpass
