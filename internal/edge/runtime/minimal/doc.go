// Package minimal is the runtime manager "linux/minimal": it starts an external runtime program, speaks SLSocket with it, and
// ends it (Seed 4, "Example"; the edge protocol, "Socket channel").
//
//	manager ──Send──▶ Runtime ──frames──▶ {dir}/{index:02x}.s ◀──connects── <command> <index>   (index in decimal)
//	        ◀─Receive─       ◀─frames───                                     │ stdout, stderr
//	               ▲──────── lines, as messages of type RuntimeLog ◀─────────┘
//
// A life of the program goes from Start until its connection or its process ends, whichever is first: then the whole process
// group is killed, Receive says errdefs.ErrUnavailable once all that the program had sent is read, and the manager calls Start
// again, with its own backoff. The program does not outlive the daemon.
//
// The package must not read what the messages say: modules, channels and topics are the manager's.
package minimal
