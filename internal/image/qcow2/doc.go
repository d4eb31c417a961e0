// Package qcow2 reads and checks the headers of qcow2 images, and writes new, empty ones.
//
//	Inspect(base) ──▶ Info, or why it is refused           CreateOverlay ──▶ header │ refcount table │ refcount block │ L1
//	      │
//	      ├ names another file (backing file, data file)   refused: QEMU would open what the image's author chose (faults I5)
//	      ├ is encrypted, corrupt, of unknown features     refused: it could not be used
//	      └ tables beyond the format's limits or the file  refused: nothing of their size is ever allocated here
//
// Sources: QEMU, docs/interop/qcow2.txt, versions 2 and 3; the limits are those of QEMU's block/qcow2.h.
//
// The package reads a header and its extensions, at most one cluster, and never what a guest wrote: that tables are
// consistent within themselves is for QEMU to find. It knows neither images nor pods, and asks nobody which format a
// file has: Inspect is for files that are known to be qcow2, and an overlay's base is named to QEMU by the caller, not
// by the overlay.
package qcow2
