// Package races lets tests fail for the data races of the processes that they start. If a process runs the test binary or
// another program built with -race, its exit status and its stderr often reach nobody, for example because the test kills
// it. It owns no processes, and leaves the reports of the test process itself to go test. Begin with Run.
package races
