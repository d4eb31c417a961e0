// Package templates makes and keeps templates: machines that were booted and stopped, and from which machines of pods continue.
// Begin with Set, one for each handler, and with Set.Find, which a machine passes before it is defined.
//
//	a machine boots ──▶ Set.Want ──▶ queue ──▶ a machine of its own: boot, Kind.Settle, Driver.Save
//	                                               │
//	the next one ◀── Set.Use, Set.Find ◀── <root>/templates/<name>/
//
// A Kind has what differs between the handlers. The package makes machines through Machines, as a node does, and must not know
// how a backend runs them. List, Remove and Check need no daemon.
package templates
