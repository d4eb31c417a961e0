// Package minimal is the runtime "linux/minimal". It runs an external runtime program, and speaks SLSocket with it.
//
//	manager ──Send──▶ Runtime ──frames──▶ {dir}/{index:02x}.s ◀──connects── <command> <index>   (index in decimal)
//	        ◀─Receive─       ◀─frames───                                     │ stdout, stderr
//	               ▲──────── lines, as messages of type RuntimeLog ◀─────────┘
//
// A run of the program (type life) lasts from Start until its connection or its process ends. Then the process group is
// killed, Receive returns errdefs.ErrUnavailable after the program's last message, and the manager calls Start again,
// with its own backoff. The program does not outlive the daemon.
//
// The package must not interpret messages. Only the manager knows about modules, channels and topics. Start reading at
// Runtime.Start.
package minimal
