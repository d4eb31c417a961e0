// Package qcow2 reads and checks the headers of qcow2 images, and writes new, empty ones.
//
//	Inspect(base) ──▶ Info, or why it is refused           CreateOverlay ──▶ header │ refcount table │ refcount block │ L1
//	      │
//	      ├ names another file (backing file, data file)   refused: QEMU would open any file it names (fault I5)
//	      ├ encrypted, corrupt or with unknown features    refused: QEMU or Tripod could not use it
//	      └ tables beyond the format's limits or the file  refused: no image can make the package allocate much memory
//
// Sources: QEMU, docs/interop/qcow2.txt, versions 2 and 3; the limits are those of QEMU's block/qcow2.h.
//
// Inspect reads the header and its extensions, which take at most one cluster. Check also walks the tables, but leaves
// their consistency to QEMU. The package must not know about images or pods. It must not detect formats either: callers
// pass files that are known to be qcow2. An overlay does not name its base; the caller tells QEMU which file is the
// base.
package qcow2
