// Package fdpass passes open files between processes over a Unix socket (SCM_RIGHTS, unix(7)). It defines frames, and a
// service with one request and one reply per connection. Stream receives files that others send without frames.
//
//	tripod-vmwrap ──{request}──▶ Server ──Handler──▶ the libvirt driver: taps, disks, sockets of one machine
//	              ◀──{reply}+files──
//	daemon ◀──frames──▶ tripod-wasm worker          internal/sandbox/wasm/internal/workerapi, with its own messages
//
// A frame is a header of 8 bytes and a message. The header consists of the length of the message and the number of file
// descriptors that come with the frame, both uint32, big endian. Frame.Close and Reader.Close close received files that
// the caller has not taken.
//
// The package knows nothing about what is passed. The Handler decides which clients to trust; the kernel identifies
// them (Peer).
package fdpass
