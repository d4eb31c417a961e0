// Package fdpass passes open files between processes over a unix socket (SCM_RIGHTS, unix(7)): frames, and a service of one
// request and one reply.
//
//	tripod-vmwrap ──{request}──▶ Server ──Handler──▶ the libvirt driver: taps, disks, sockets of one machine
//	              ◀──{reply}+files──
//	daemon ◀──frames──▶ tripod-wasm worker          internal/sandbox/wasm/internal/workerapi, which has messages of its own
//
// A frame is a header of 8 bytes and a message; the header is the length of the message and the number of file descriptors
// that travel with the frame, both uint32, big endian. A file that has arrived belongs to the reader until somebody takes it
// out of its Frame, and is closed with the frame or the reader else.
//
// The package knows nothing of what is passed. Whom to trust is the Handler's decision: it is told who asks, by the kernel's
// word (Peer).
package fdpass
