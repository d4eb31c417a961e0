# `make help` lists the targets. Debian 12, Go and root are required; `make setup` installs the rest. Tests run in their own
# network, mount and PID namespaces and leave nothing behind (docs/testing.md).

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

VERSION     ?= 0.1.0-dev$(shell git rev-parse --short=12 HEAD 2>/dev/null | sed 's/^/+g/')
BIN         := build/bin/tripod
# The worker with the Wasm engine, which the daemon expects beside itself.
WORKER      := build/bin/tripod-wasm
# The emulator program that libvirt starts (driver "libvirt"), also beside the daemon.
VMWRAP      := build/bin/tripod-vmwrap
# The agent in virtual machines, also beside the daemon, which puts it on a small disk.
AGENT       := build/bin/tripod-agent
# The program in the guest of OCI pods that drives their containers.
GUEST       := build/bin/tripod-guest
# tripod with fail points and the fake backend, which a release does not have; only tests start it.
TESTBIN     := build/test/bin/tripod
DESTDIR     ?=
PREFIX      ?= /usr/local
# Flags for go build; releases use -trimpath. (Without it, the tests share the build cache.)
BUILDFLAGS  ?=
# Flags for the linker; releases have no build ID, which would depend on where the checkout is.
LINKFLAGS   ?=
UNITDIR     ?= $(PREFIX)/lib/systemd/system
NETWORKDIR  ?= $(dir $(UNITDIR))network

GOTEST      := go test -count=1 -timeout 40m
# CI runs tests that depend on installed programs, even if Go has their result in its cache (hack/unit.sh).
COUNT       := $(if $(CI),-count=1)
FUZZTIME    ?= 20s

# One tested binary for all packages, instead of one build in each.
export TRIPOD_BIN := $(CURDIR)/$(BIN)
export TRIPOD_TEST_BIN := $(CURDIR)/$(TESTBIN)
# Pure Go, except the worker, whose engine is a C library, and the race detector.
export CGO_ENABLED := 0
export TRIPOD_WASM_BIN := $(CURDIR)/$(WORKER)
export TRIPOD_AGENT_BIN := $(CURDIR)/$(AGENT)
export TRIPOD_VMWRAP_BIN := $(CURDIR)/$(VMWRAP)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install the required Debian packages and Go modules (as root; quick if complete)
	@hack/setup.sh

# go build sets the time of a program that is up to date, which for Go's test cache is a change, as is a new link. `install -C`
# does not.
.PHONY: engine
engine: ## make build/engine, the library with the Wasm engine that tripod-wasm links (5 min, once for all checkouts)
	@hack/engine.sh

.PHONY: update-engine
update-engine: ## take the newest fixes of wasmtime's line, test them, and measure them beside the old ones' figures in docs/benchmarks.md
	@hack/engine.sh update
	@$(MAKE) build images
	CGO_ENABLED=1 hack/testns.sh $(GOTEST) -vet=off ./internal/component/... ./internal/sandbox/wasm/...
	@hack/setup.sh bench
	@hack/bench.sh first

.PHONY: build
build: engine ## build the programs into build/bin: tripod (static), tripod-wasm (the worker with the Wasm engine) and others; build/test/bin for the tests
	hack/patience.sh 'build: tripod' go build $(BUILDFLAGS) -ldflags '-s -w $(LINKFLAGS) -X main.version=$(VERSION)' -o build/obj/ ./cmd/tripod
	CGO_ENABLED=1 hack/patience.sh 'build: tripod-wasm' go build $(BUILDFLAGS) -ldflags '-s -w $(LINKFLAGS) -X main.version=$(VERSION)' -o build/obj/ ./cmd/tripod-wasm
	go build $(BUILDFLAGS) -ldflags '-s -w $(LINKFLAGS)' -o build/obj/ ./cmd/tripod-vmwrap
	go build -trimpath -ldflags '-s -w $(LINKFLAGS) -X main.version=$(VERSION)' -o build/obj/ ./cmd/tripod-agent
	go build -trimpath -ldflags '-s -w $(LINKFLAGS) -X main.version=$(VERSION)' -o build/obj/ ./cmd/tripod-guest
	hack/patience.sh 'build: tripod for tests' go build -tags failpoints $(BUILDFLAGS) -ldflags '-s -w $(LINKFLAGS) -X main.version=$(VERSION)' -o build/obj/test/ ./cmd/tripod
	@install -CDt $(dir $(BIN)) build/obj/tripod*
	@install -CDt $(dir $(TESTBIN)) build/obj/test/tripod
	@cd $(dir $(TESTBIN)) && for p in $(notdir $(WORKER) $(VMWRAP) $(AGENT)); do [ -L $$p ] || ln -s ../../bin/$$p; done

.PHONY: run
run: setup build guest ## demonstrate a node: pods of each kind, and how they survive kill -9 of the daemon
	@hack/run.sh

.PHONY: up down
up: setup build guest ## start a node to experiment with, with a registry and images
	@hack/run.sh up
down: ## stop it and clean up
	@hack/run.sh down

.PHONY: test
test: ## run what every change must pass: lint, unit, backend, end-to-end and crash tests
	@hack/test.sh setup engine build lint test-unit test-machines test-daemon test-smoke

.PHONY: quick
quick: engine build/tools/golangci-lint build/tools/gotestsum build/tools/h2spec ## check what a commit could break, in minutes: vet, lint, unit and end-to-end tests of what depends on the files changed since BASE
	@go run ./hack/quick -base '$(BASE)' -unit "$$(hack/unit.sh packages)"

.PHONY: test-unit test-machines
test-unit: build images build/tools/gotestsum build/tools/h2spec ## run the unit tests with the race detector, and check the import rules
	@hack/unit.sh
test-machines: build images build/tools/gotestsum ## run the unit tests that boot machines
	@hack/unit.sh machines

# One package at a time: two cores are too few for the deadlines of two nodes. Crash tests are never run again.
.PHONY: test-daemon
test-daemon: build images guest build/tools/gotestsum ## run the end-to-end and crash tests against real daemons
	@export TRIPOD_TEST_WORLDS=3; code=0; \
	hack/gotest.sh $@.e2e ./test/e2e/... -vet=off $(COUNT) -p 1 -timeout 40m || code=1; \
	GOTESTSUM=--rerun-fails=0 hack/gotest.sh $@.crash ./test/crash/... -vet=off $(COUNT) -timeout 40m || code=1; \
	exit $$code

.PHONY: flaky
flaky: build images build/tools/gotestsum build/tools/h2spec ## run the unit tests of PKG (all) N times (50) beside busy loops, and list those that are not always green
	@hack/flaky.sh '$(or $(N),50)' '$(or $(PKG),./cmd/... ./internal/...)' $(if $(RUN),-run '$(RUN)')

.PHONY: test-all
test-all: ## run every test: also all fail points with both OCI runtimes, stress, attacks, Connect's suite, a real browser, MQTT clients, a real kubelet with its node specs, soak, short fuzzing, a real Debian, an ordinary host
	TRIPOD_TEST_FULL=1 $(MAKE) test
	$(MAKE) test-attack test-delegate test-templates test-connect test-browser test-mqtt test-edge-loss test-sanitize test-kubelet test-e2e-node test-release fuzz fuzz-mqtt debian test-host
	TRIPOD_SOAK=10000x $(MAKE) soak

.PHONY: test-delegate
test-delegate: build images ## run the end-to-end tests of Linux pods through a Tripod that delegates them to containerd (15 min); again with Debian's containerd the migration
	hack/delegate.sh
	TRIPOD_TEST_CONTAINERD=$$(hack/containerd.sh) hack/testns.sh $(GOTEST) -run '^TestContainerdInTheField$$' ./internal/image
	@hack/setup.sh bench
	TRIPOD_TEST_DELEGATE=/usr/bin $(GOTEST) -v -run '^TestMigrateFromContainerd$$' ./test/e2e

.PHONY: test-attack
test-attack: build images ## run hostile containers, components, machines, images, registries and clients (10 min)
	TRIPOD_TEST_FULL=1 $(GOTEST) -v ./test/attack/...

.PHONY: test-templates
test-templates: build images build/npm/downloaded build/wheels/downloaded build/bindgen/downloaded ## test the components that `tripod component new` writes, in each language (9 min; installs Node.js, Python's venv, clang, Debian's Rust, packages of npm and PyPI, and crates)
	@command -v npm >/dev/null || hack/setup.sh templates
	TRIPOD_TEST_TEMPLATES=1 $(GOTEST) -run '^TestWasm(Template|PythonServer|ComponentNew(C|Python|Rust))' ./test/e2e

# What new components in JavaScript install, in npm's cache: the tests' namespaces have no way to npm.
build/npm/downloaded: $(wildcard internal/cli/scaffold/templates/js/package*) | build
	@command -v npm >/dev/null || hack/setup.sh templates
	rm -rf build/npm
	npm_config_cache=$(CURDIR)/build/npm/cache build/bin/tripod component new --lang js build/npm/echo examples/wasm/echo-c/echo.proto
	touch $@

# What new components in Python install: the tests' namespaces have no way to PyPI.
build/wheels/downloaded: internal/cli/scaffold/templates/python/requirements.txt.tmpl
	@python3 -c 'import ensurepip' 2>/dev/null || hack/setup.sh templates
	python3 -m venv --clear build/wheels/venv
	build/wheels/venv/bin/pip download --quiet --disable-pip-version-check --require-hashes --requirement $< --dest build/wheels
	touch $@

# The tool of new components in C and Rust, built as for a user.
build/bindgen/downloaded: $(wildcard internal/cli/scaffold/runtime/bindgen/*) | build
	@command -v clang-14 >/dev/null && [ -d /usr/lib/rustlib/wasm32-wasi ] || hack/setup.sh templates
	rm -rf build/bindgen
	XDG_CACHE_HOME=$(CURDIR)/build/bindgen build/bin/tripod component new --lang c build/bindgen/echo examples/wasm/echo-c/echo.proto
	touch $@

.PHONY: test-connect
test-connect: build images build/tools/connectconformance ## run the public conformance suite of Connect, gRPC and gRPC-Web, and the gRPC interop cases, against a component and a Go server (6 min)
	$(GOTEST) -timeout 40m ./test/connect/...

build/tools/connectconformance: hack/connect/go.mod hack/connect/go.sum
	go build -C hack/connect -o $(CURDIR)/$@ connectrpc.com/conformance/cmd/connectconformance

build/tools/h2spec: hack/h2spec/go.mod hack/h2spec/go.sum
	go build -C hack/h2spec -o $(CURDIR)/$@ github.com/summerwind/h2spec/cmd/h2spec

.PHONY: test-browser
test-browser: build images build/browser/page.js build/tools/kubelet-probe ## call components from a page in Chromium, through nginx and HAProxy, and by a kubelet's probes (2 min; installs Chromium)
	@hack/setup.sh browser
	$(GOTEST) ./test/browser/...

# The page's packages are pinned in its package-lock.json.
build/browser/page.js: $(wildcard test/browser/page/*)
	@command -v npm >/dev/null || hack/setup.sh browser
	mkdir -p build/browser && cp test/browser/page/package*.json build/browser
	npm ci --prefix build/browser --no-audit --no-fund --loglevel=error
	NODE_PATH=build/browser/node_modules build/browser/node_modules/.bin/esbuild test/browser/page/page.js --bundle --log-level=warning --outfile=$@

.PHONY: test-edge-loss
test-edge-loss: build images ## count 2 000 000 messages of modules while the daemon, the broker and the orchestrator are killed at random (2 min)
	TRIPOD_EDGE_MESSAGES=2000000 $(GOTEST) -v -run '^TestEdgeLosesNothing$$' ./test/e2e

.PHONY: test-mqtt
test-mqtt: build/mqttclients/installed ## test the embedded broker with MQTT.js, paho, aiomqtt, autopaho and mosquitto's clients (1 min; installs packages of npm and PyPI)
	hack/testns.sh $(GOTEST) -parallel 12 ./test/mqttclients

# The clients are pinned by the package-lock.json and the requirements.txt.
build/mqttclients/installed: test/mqttclients/package.json test/mqttclients/package-lock.json test/mqttclients/requirements.txt
	@hack/setup.sh mqtt
	mkdir -p build/mqttclients && cp $^ build/mqttclients
	npm ci --prefix build/mqttclients --no-audit --no-fund --loglevel=error
	/usr/bin/python3 -m venv --clear build/mqttclients/venv
	build/mqttclients/venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement test/mqttclients/requirements.txt
	touch $@

build/tools/kubelet-probe: hack/kube/probe/main.go hack/kube/go.mod
	go build -C hack/kube -o $(CURDIR)/$@ ./probe

.PHONY: test-kubelet
test-kubelet: build images guest kube ## test pods of each kind with a real kubelet, in a cluster of one node and in one of two
	@hack/kube.sh build metrics
	$(GOTEST) -timeout 2h -parallel 6 -v ./test/kubelet/...
	@hack/kube.sh build cluster
	$(GOTEST) -timeout 30m -v ./test/cluster/...
	@hack/kube.sh build kubeadm
	$(GOTEST) -v ./test/kubeadm/...

# The part of test-kubelet in `make test`. If Kubernetes is not built, it is skipped with a message, because the build takes long.
.PHONY: test-smoke
test-smoke: build images guest build/tools/gotestsum
	@if hack/kube.sh check >/dev/null; then hack/gotest.sh $@ ./test/kubelet -vet=off -count=1 -parallel 3 -run '^TestSmoke$$'; else \
	  echo 'make test: WITHOUT the smoke test of a real kubelet; make test-kubelet builds what is missing'; fi

.PHONY: test-e2e-node
test-e2e-node: build kube ## run Kubernetes' public node specs in a one-node cluster (30 min); reports in build/e2e-node
	@hack/kube.sh build e2e
	@hack/images.sh build
	$(GOTEST) -timeout 2h -v ./test/e2enode/...

.PHONY: kubelet-up kubelet-down kube
kubelet-up: setup build kube ## start a Kubernetes cluster to experiment with, with a registry, images and NODES (1) nodes
	@NODES='$(NODES)' hack/kube.sh up
kubelet-down: ## stop it and clean up
	@hack/kube.sh down
kube: # the programs of Kubernetes and etcd: a quarter of an hour, once
	@hack/setup.sh kubelet
	@hack/kube.sh build

.PHONY: debian
debian: build images ## test a real Debian with systemd and cloud-init as an emulated machine, and one with PostgreSQL and Redis
	@hack/setup.sh debian
	@hack/images/debian.sh
	@hack/images/databases.sh
	$(GOTEST) -timeout 1h -v ./test/debian/...

.PHONY: test-host
test-host: build images build/tools/critest ## test the Debian package in an ordinary Debian with systemd, cgroup v2 and AppArmor, in a machine (1 h; RUN=PATTERN runs some)
	@hack/setup.sh debian
	@hack/images/host.sh
	rm -f build/release/tripod_*.deb
	@$(MAKE) deb
	$(GOTEST) -timeout 3h -v $(if $(RUN),-run '$(RUN)') ./test/host

# The suite is a test binary. Its main package only links it.
build/tools/critest: hack/critest/go.mod hack/critest/go.sum
	cd hack/critest && go test -c -o $(CURDIR)/$@ sigs.k8s.io/cri-tools/cmd/critest

.PHONY: soak
soak: build images ## run random calls and faults against a real daemon, for TRIPOD_SOAK (30s, or 10000x cycles) per backend
	$(GOTEST) -timeout 24h -v ./test/soak/...

.PHONY: bench
bench: build images ## compare with containerd 2.4 and 1.6 and write docs/benchmarks.md
	@hack/setup.sh bench
	@hack/bench.sh

.PHONY: bench-serve
bench-serve: build images ## compare components of wasi:http with wasmtime serve, which it builds first (20 min, once); make bench then has it, too
	@hack/setup.sh serve
	@hack/bench.sh serve

.PHONY: fuzz
fuzz: engine ## run each fuzz target for FUZZTIME (20s)
	@hack/fuzz.sh $(FUZZTIME)

# Both sanitizers see the C half of the engine. At the end of the worker's tests pods run, whose C memory only Go refers to: the
# address sanitizer would take it for leaked.
SANITIZED = ./internal/component/engine ./internal/component/wasi ./internal/component/wasihttp ./internal/sandbox/wasm/internal/dataplane
.PHONY: test-sanitize
test-sanitize: build images ## run the tests of the engine, the data plane and the worker with the address sanitizer, and with that of undefined behaviour (8 min)
	CGO_ENABLED=1 hack/testns.sh $(GOTEST) -vet=off -asan $(SANITIZED)
	CGO_ENABLED=1 ASAN_OPTIONS=detect_leaks=0 hack/testns.sh $(GOTEST) -vet=off -asan ./internal/sandbox/wasm/internal/worker
	CGO_ENABLED=1 CGO_CFLAGS='-g -O1 -fsanitize=undefined -fno-sanitize-recover=all' CGO_LDFLAGS=-fsanitize=undefined hack/testns.sh $(GOTEST) -vet=off $(SANITIZED) ./internal/sandbox/wasm/internal/worker

.PHONY: fuzz-mqtt
fuzz-mqtt: engine ## run the fuzz targets of the MQTT codec and of the broker's sessions for five minutes each
	@hack/fuzz.sh 5m '^Fuzz(Packet|Session)$$'

.PHONY: lint
lint: engine build/tools/golangci-lint build/tools/deadcode ## run go vet, golangci-lint (.golangci.yml), deadcode, go mod tidy, cppcheck, gofmt, the prose check and bash -n
# golangci-lint vets with the tag failpoints, go vet without.
	CGO_ENABLED=1 go vet ./...
	CGO_ENABLED=1 build/tools/golangci-lint run
	@for dir in $(MODULES); do (cd $$dir && go mod tidy -diff && go vet ./...) || exit 1; done
	cd sdk/go && ../../build/tools/golangci-lint run && export GOOS=wasip1 GOARCH=wasm && go vet ./... && ../../build/tools/golangci-lint run --disable unused # it overlooks go:wasmexport
# What no program and no test calls, and what no program calls but tests do.
	@dead=$$(export CGO_ENABLED=1; build/tools/deadcode -test -tags failpoints ./... && build/tools/deadcode ./cmd/...) && \
	  { ! grep -vEf <(sed '/^#/d; /^$$/d' hack/deadcode.allow) <<<"$$dead" || { echo 'remove these functions, or move them to the tests' >&2; exit 1; }; }
	go mod tidy -diff
	CGO_ENABLED=1 CGO_CFLAGS='-g -O2 -Werror' go build ./internal/component/engine
	cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,performance,portability --inconclusive internal/component/engine/*.c
	@files=$$(gofmt -l cmd examples hack internal sdk test); [ -z "$$files" ] || { printf 'run gofmt -w on these files:\n%s\n' "$$files" >&2; exit 1; }
	@go test ./test/prose
	@for f in hack/*.sh hack/images/*.sh examples/*/build.sh .ci/run; do bash -n "$$f"; done

# Modules of their own: the SDK, and guests that are built with it.
MODULES := sdk/go examples/wasm/greeter-go test/guests

# Pinned in a separate module, to keep their 200 dependencies out of the product's. Takes about a minute, once.
TOOLS := github.com/golangci/golangci-lint/v2/cmd/golangci-lint golang.org/x/tools/cmd/deadcode gotest.tools/gotestsum
build/tools/golangci-lint build/tools/deadcode build/tools/gotestsum: hack/tools/go.mod hack/tools/go.sum
	go build -C hack/tools -o $(CURDIR)/$@ $(filter %/$(notdir $@),$(TOOLS))
	@touch $@

.PHONY: images
images: ## build the test and demo images into build/images (cached)
	@hack/images.sh build

.PHONY: guest
guest: build ## build the guest of OCI pods into build/guest: kernel, initramfs and root disk (cached)
	@hack/guest.sh $(GUEST)
	go build -tags failpoints -trimpath -ldflags '-s -w $(LINKFLAGS)' -o build/test/bin/ ./cmd/tripod-guest
	@hack/guest.sh build/test/bin/tripod-guest build/test/guest

.PHONY: examples
examples: ## rebuild the .wasm files of examples/ (installs clang-14, wasi-libc and npm packages)
	@examples/wasm/build.sh
	@examples/edge/build.sh

.PHONY: install
install: build ## install the programs, manual pages, completions and systemd units below DESTDIR and PREFIX
	install -D -m 0755 $(BIN) $(DESTDIR)$(PREFIX)/bin/tripod
	install -D -m 0755 $(WORKER) $(DESTDIR)$(PREFIX)/bin/tripod-wasm
	install -D -m 0755 $(VMWRAP) $(DESTDIR)$(PREFIX)/bin/tripod-vmwrap
	install -D -m 0755 $(AGENT) $(DESTDIR)$(PREFIX)/bin/tripod-agent
	rm -rf build/man && $(BIN) man build/man && install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/man/man1 build/man/*
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions zsh/site-functions fish/vendor_completions.d)
	$(BIN) completion bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/tripod
	$(BIN) completion zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_tripod
	$(BIN) completion fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/tripod.fish
	install -d $(DESTDIR)$(UNITDIR)
	for unit in tripod tripod-orchestrator; do \
	  sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/$$unit.service >$(DESTDIR)$(UNITDIR)/$$unit.service; done
	install -D -m 0644 dist/tripod.network $(DESTDIR)$(NETWORKDIR)/05-tripod.network

.PHONY: install-guest
install-guest: guest ## install the guest of OCI pods (handler vm-oci) below DESTDIR and PREFIX
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/lib/tripod/guest build/guest/vmlinux build/guest/initrd build/guest/root.erofs

.PHONY: deb
deb: ## build/release: a Debian package of VERSION
	@hack/setup.sh release
	@VERSION='$(VERSION)' hack/deb.sh

.PHONY: release-notes
release-notes: ## what CHANGELOG.md says of VERSION; without one what is not released yet
	@hack/notes.sh '$(VERSION)'

.PHONY: release
release: ## build/release: VERSION as an archive and a Debian package, with notes, licenses, SBOM and checksums; two clones of a commit give the same bytes
	@hack/setup.sh release
	@VERSION='$(VERSION)' hack/release.sh

.PHONY: test-release
test-release: images ## build a release in two clones and compare the bytes, and install, upgrade and purge the Debian package (5 min)
	@hack/release_test.sh
	$(GOTEST) ./test/deb

.PHONY: vuln
vuln: engine build/tools/govulncheck ## look for known vulnerabilities in what the programs call (needs the Go vulnerability database, or GOVULNDB)
	CGO_ENABLED=1 build/tools/govulncheck ./cmd/...

build/tools/syft build/tools/govulncheck: hack/release/go.mod hack/release/go.sum
	go build -C hack/release -ldflags '-s -w' -o $(CURDIR)/$@ $(filter %/$(notdir $@),github.com/anchore/syft/cmd/syft golang.org/x/vuln/cmd/govulncheck)
	@touch $@

.PHONY: clean
clean: ## remove build/
	rm -rf build
