// Package attach is the waiting line between a container's output and the clients that are attached to it: whoever reads the
// output never waits for a client, and one that is too far behind is cut off.
//
//	output ──▶ Client.Put ──▶ queue ──▶ Client.Deliver ──▶ the client's stdout and stderr
//	                            └ full: Put is false, Cut is closed
//
// Where the output comes from, and who the clients are, is its users' matter (internal/sandbox/linux, internal/sandbox/vm/internal/console).
package attach
