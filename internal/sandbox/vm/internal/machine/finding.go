package machine

// Finding is a result of a check of the host.
type Finding struct {
	Subject string
	// OK is the result. If Required is set, machines cannot run without it.
	OK, Required bool
	// Detail is what the check found, Remedy what to do if it is not OK.
	Detail, Remedy string
}
