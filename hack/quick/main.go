// The program quick checks what depends on the files that changed since a commit, within minutes. It runs vet, lint and
// tests, and prints what it leaves to `make test`. It decides by two things: the import graph (graph.go, plan.go) and a
// table of what belongs together (rooms.go). It must not run tests that boot machines for a change elsewhere.
//
//	make quick                 # since the merge base with origin/main, otherwise what is not committed
//	make quick BASE=HEAD~3
//	go run ./hack/quick -plan  # print the plan only; in the root of the repository
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

func main() {
	base := flag.String("base", "",
		"the `commit` to compare with; by default the merge base with origin/main or origin/HEAD, otherwise HEAD, or HEAD~1 if nothing has changed since")
	unit := flag.String("unit", "./cmd/... ./internal/...", "the `patterns` of the packages with unit tests")
	planOnly := flag.Bool("plan", false, "print the plan and run nothing")
	flag.Parse()
	start := time.Now()
	p, err := load(*base, strings.Fields(*unit))
	if err != nil {
		fmt.Fprintln(os.Stderr, "quick:", err)
		os.Exit(1)
	}
	p.print(os.Stdout)
	if *planOnly {
		return
	}
	if err := p.run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quick: FAILED:", err)
		os.Exit(1)
	}
	fmt.Printf("quick: %d packages, %d end-to-end tests, %.0f s\n", len(p.race)+len(p.plain), p.endToEnd(), time.Since(start).Seconds())
}

// load reads the changes and the repository, and returns the plan.
func load(base string, unit []string) (*plan, error) {
	base, files, err := changes(base)
	if err != nil {
		return nil, err
	}
	repo, err := read(unit)
	if err != nil {
		return nil, err
	}
	p := repo.plan(files)
	p.base = base
	return p, nil
}
