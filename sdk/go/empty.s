// The compiler accepts a function without a body (mainMain) only in a package with an assembly file.
