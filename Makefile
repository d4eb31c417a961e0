# Tripod. `make` or `make help` lists what there is to do. Debian 12, Go and root are assumed; `make setup` installs
# the rest. Tests run in network, mount and PID namespaces of their own and leave nothing behind (docs/testing.md).

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

VERSION     ?= 0.1.0-dev$(shell git rev-parse --short=12 HEAD 2>/dev/null | sed 's/^/+g/')
BIN         := build/bin/tripod
# The worker that holds the Wasm engine; the daemon looks for it beside itself.
WORKER      := build/bin/tripod-wasm
# What libvirt takes for QEMU (driver "libvirt"); it is beside the daemon, too.
VMWRAP      := build/bin/tripod-vmwrap
# What runs in virtual machines; the daemon looks for it beside itself and puts it onto a small disk.
AGENT       := build/bin/tripod-agent
# tripod with fail points and the fake backend, which a release does not have; only tests start it.
TESTBIN     := build/test/bin/tripod
DESTDIR     ?=
PREFIX      ?= /usr/local
# Flags for go build; a release is built with -trimpath. (Without, the tests share what is compiled.)
BUILDFLAGS  ?=
UNITDIR     ?= $(PREFIX)/lib/systemd/system

# Unit tests and the suites of the backends; those that make namespaces are root's, inside testns like all the others.
UNIT        := ./cmd/... ./internal/... ./test/sandboxtest/... ./test/edgetest/...
# Real daemons. One package at a time: two cores are not enough for two nodes and their deadlines.
DAEMON      := $(patsubst %,./%/...,$(wildcard test/e2e test/crash))
GOTEST      := go test -count=1 -timeout 40m
FUZZTIME    ?= 20s

# One binary under test for all packages, rather than one that each of them builds.
export TRIPOD_BIN := $(CURDIR)/$(BIN)
export TRIPOD_TEST_BIN := $(CURDIR)/$(TESTBIN)
# Pure Go everywhere but in the worker, whose engine is a C library, and under the race detector, which is C.
export CGO_ENABLED := 0
export TRIPOD_WASM_BIN := $(CURDIR)/$(WORKER)
export TRIPOD_AGENT_BIN := $(CURDIR)/$(AGENT)
export TRIPOD_VMWRAP_BIN := $(CURDIR)/$(VMWRAP)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install the Debian packages and Go modules that everything needs (root; quick when all is there)
	@hack/setup.sh

.PHONY: build
build: ## build/bin/tripod, static, and build/bin/tripod-wasm, the worker with the Wasm engine; build/test/bin for the tests
	go build $(BUILDFLAGS) -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN) ./cmd/tripod
	CGO_ENABLED=1 go build $(BUILDFLAGS) -ldflags '-s -w -X main.version=$(VERSION)' -o $(WORKER) ./cmd/tripod-wasm
	go build $(BUILDFLAGS) -ldflags '-s -w' -o $(VMWRAP) ./cmd/tripod-vmwrap
	go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $(AGENT) ./cmd/tripod-agent
	go build -tags failpoints $(BUILDFLAGS) -ldflags '-s -w -X main.version=$(VERSION)' -o $(TESTBIN) ./cmd/tripod
	@ln -srf $(WORKER) $(VMWRAP) $(AGENT) $(dir $(TESTBIN))

.PHONY: run
run: setup build ## see it work: a node, two pods, kill -9 of the daemon, and everything still there
	@hack/run.sh

.PHONY: up down
up: setup build ## a node that stays, with a registry and images, to try things on
	@hack/run.sh up
down: ## end it and clean up
	@hack/run.sh down

.PHONY: test
test: setup build lint test-unit test-daemon test-smoke ## all that a change must pass: lint, unit, backend, end-to-end and crash tests

.PHONY: test-unit
test-unit: images ## unit tests with the race detector, and the rules about imports
	CGO_ENABLED=1 hack/testns.sh -strict go test -tags failpoints -race -timeout 15m $(UNIT)
	$(GOTEST) ./test/deps/... ./test/harness/...

.PHONY: test-daemon
test-daemon: build images ## end-to-end and crash tests against real daemons
	$(GOTEST) -p 1 $(DAEMON)

.PHONY: test-all
test-all: ## test, with every fail point under both OCI runtimes and the data plane under stress, those who mean harm, the public suite of Connect, a real kubelet, its public specs, the soak test, every fuzz target shortly, a real Debian
	TRIPOD_TEST_FULL=1 $(MAKE) test
	$(MAKE) test-attack test-connect test-kubelet test-e2e-node fuzz debian
	TRIPOD_SOAK=10000x $(MAKE) soak

.PHONY: test-attack
test-attack: build images ## containers, components, machines, images, registries and clients that mean harm; ten minutes
	TRIPOD_TEST_FULL=1 $(GOTEST) -v ./test/attack/...

.PHONY: test-connect
test-connect: build images build/tools/connectconformance ## the public conformance suite of Connect, gRPC and gRPC-Web against a component, two minutes
	$(GOTEST) -timeout 40m ./test/connect/...

build/tools/connectconformance: hack/connect/go.mod hack/connect/go.sum
	go build -C hack/connect -o $(CURDIR)/$@ connectrpc.com/conformance/cmd/connectconformance

.PHONY: test-kubelet
test-kubelet: build images kube ## pods of each kind under a real kubelet, in a cluster of one node
	$(GOTEST) -timeout 2h -parallel 6 -v ./test/kubelet/...

# The part of it that is in make test. To build Kubernetes for that would take too long, so it says that it does not run.
.PHONY: test-smoke
test-smoke: build images
	@if hack/kube.sh check >/dev/null; then $(GOTEST) -parallel 3 -v -run '^TestSmoke$$' ./test/kubelet; else \
	  echo 'make test: WITHOUT the smoke test of a real kubelet; make test-kubelet builds what is missing'; fi

.PHONY: test-e2e-node
test-e2e-node: build kube ## the public node specs of Kubernetes in that cluster, half an hour; reports in build/e2e-node
	@hack/kube.sh build e2e
	@hack/images.sh build
	$(GOTEST) -timeout 2h -v ./test/e2enode/...

.PHONY: kubelet-up kubelet-down kube
kubelet-up: setup build kube ## a Kubernetes cluster of one node that stays, with a registry and images, to try things on
	@hack/kube.sh up
kubelet-down: ## end it and clean up
	@hack/kube.sh down
kube: # the programs of Kubernetes and etcd: a quarter of an hour, once
	@hack/setup.sh kubelet
	@hack/kube.sh build

.PHONY: debian
debian: build images ## a real Debian with systemd and cloud-init as a machine, and its PostgreSQL and Redis in one, of packages from a mirror, emulated
	@hack/setup.sh debian
	@hack/images/debian.sh
	@hack/images/databases.sh
	$(GOTEST) -timeout 1h -v ./test/debian/...

.PHONY: soak
soak: build images ## random calls and faults against a real daemon, TRIPOD_SOAK (30s, or 10000x cycles) for each backend
	$(GOTEST) -timeout 24h -v ./test/soak/...

.PHONY: bench
bench: build images ## side by side with Debian's containerd, into docs/benchmarks.md
	@hack/setup.sh bench
	@hack/bench.sh

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (20s)
	@hack/fuzz.sh $(FUZZTIME)

.PHONY: lint
lint: build/tools/golangci-lint build/tools/deadcode ## go vet, golangci-lint (.golangci.yml), dead code, go mod tidy, gofmt, phrases that stumble, bash -n
	CGO_ENABLED=1 go vet ./...
	CGO_ENABLED=1 go vet -tags failpoints ./...
	CGO_ENABLED=1 build/tools/golangci-lint run
# What no program and no test calls, and what no program calls but tests do.
	@dead=$$(export CGO_ENABLED=1; build/tools/deadcode -test -tags failpoints ./... && build/tools/deadcode ./cmd/...) && \
	  { ! grep -vEf <(sed '/^#/d; /^$$/d' hack/deadcode.allow) <<<"$$dead" || { echo 'remove these functions, or move them to the tests' >&2; exit 1; }; }
	go mod tidy -diff
	@test -z "$$(gofmt -l cmd examples hack internal test | tee /dev/stderr)" || { echo 'run gofmt -w on these files' >&2; exit 1; }
	@go test ./test/prose
	@for f in hack/*.sh hack/images/*.sh examples/*/build.sh .ci/run; do bash -n "$$f"; done

# Pinned in a module of its own, so that their 200 dependencies are not the product's. About a minute, once.
LINTERS := github.com/golangci/golangci-lint/v2/cmd/golangci-lint golang.org/x/tools/cmd/deadcode
build/tools/golangci-lint build/tools/deadcode: hack/tools/go.mod hack/tools/go.sum
	go build -C hack/tools -o $(CURDIR)/$@ $(filter %/$(notdir $@),$(LINTERS))
	@touch $@

.PHONY: images
images: ## the container images of the tests and the demo, into build/images (cached)
	@hack/images.sh build

.PHONY: examples
examples: ## the .wasm files of examples/ from their sources (installs clang-14, wasi-libc and npm packages)
	@examples/wasm/build.sh
	@examples/edge/build.sh

.PHONY: install
install: build ## the programs and the systemd units, below DESTDIR and PREFIX
	install -D -m 0755 $(BIN) $(DESTDIR)$(PREFIX)/bin/tripod
	install -D -m 0755 $(WORKER) $(DESTDIR)$(PREFIX)/bin/tripod-wasm
	install -D -m 0755 $(VMWRAP) $(DESTDIR)$(PREFIX)/bin/tripod-vmwrap
	install -D -m 0755 $(AGENT) $(DESTDIR)$(PREFIX)/bin/tripod-agent
	install -D -m 0644 -t $(DESTDIR)$(UNITDIR) dist/tripod.service dist/tripod-orchestrator.service

.PHONY: release-notes
release-notes: ## what CHANGELOG.md says of VERSION; without one what is not released yet
	@hack/notes.sh '$(VERSION)'

# The notes come first: a version that the changelog does not know is not built.
.PHONY: release
release: ## build/release: an archive of the programs and units of VERSION, and its notes
	rm -rf build/release && mkdir -p build/release
	hack/notes.sh '$(VERSION)' >build/release/NOTES.md
	$(MAKE) install BUILDFLAGS=-trimpath DESTDIR=build/release/root
	install -m 0644 LICENSE CHANGELOG.md build/release/root
	tar -C build/release/root --sort=name --owner=0 --group=0 -czf 'build/release/tripod-$(VERSION)-linux-$(shell go env GOARCH).tar.gz' .
	rm -rf build/release/root

.PHONY: clean
clean: ## remove build/
	rm -rf build
