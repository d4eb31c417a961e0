// Package iso9660 writes small read-only ISO 9660 images: the cloud-init disk of a VM and the disk with the guest agent.
//
//	sector 16  primary volume descriptor ──▶ path tables ──▶ directories with Rock Ridge  ─┐
//	       17  Joliet volume descriptor  ──▶ path tables ──▶ directories in UCS-2         ─┼─▶ the files, once
//	       18  terminator                                                                  ┘
//
// An image is built in memory and is the same, byte for byte, for the same files: all times are one constant. Files keep
// their names ("meta-data", "openstack/latest/meta_data.json") and permissions for readers of Rock Ridge (Linux, the BSDs)
// and their names for those of Joliet (Windows). The formats are ECMA-119 (second edition), the Joliet specification of
// 1995, and IEEE P1281/P1282 (SUSP and Rock Ridge 1.10).
//
// The package must not touch the disk: what it is given may be secret, and a temporary file would outlive a crash.
package iso9660
