// Package iso9660 makes small read-only ISO 9660 images: a machine's cloud-init disk and the disk with the guest's
// agent. Begin with Build.
//
//	sector 16  primary volume descriptor ──▶ path tables ──▶ directories with Rock Ridge  ─┐
//	       17  Joliet volume descriptor  ──▶ path tables ──▶ directories in UCS-2         ─┴─▶ contents of files
//	       18  terminator
//
// An image is built in memory. The same files yield the same bytes, because all timestamps are constant. Rock Ridge,
// which Linux and the BSDs read, keeps the names ("meta-data", "openstack/latest/meta_data.json") and permissions of
// files. Joliet, which Windows reads, keeps only the names. The formats are specified by ECMA-119 (second edition), the
// Joliet specification of 1995, and IEEE P1281/P1282 (SUSP and Rock Ridge 1.10).
//
// Build must not write files, because the content may be secret and a temporary file would survive a crash.
package iso9660
