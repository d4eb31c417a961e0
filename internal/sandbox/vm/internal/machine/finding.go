package machine

// Finding is one thing that a check of the host looked at.
type Finding struct {
	Subject string
	// OK says that it is as it should be; Required, that machines cannot run when it is not.
	OK, Required bool
	// Detail says what was found, Remedy what to do when it is not OK.
	Detail, Remedy string
}
