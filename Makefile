# The tiers of tests. CONTRIBUTING.md says what each is for and how long it takes.
#
#   make lint       format, vet and linters
#   make check      lint, and the tests that need no server
#   make test       every promise once on a real server, and smoke tests of the rest
#   make adapters   the modules below contrib
#   make costs      what each operation costs: requests, bytes and allocations
#   make test-all   everything at full size on all servers; PART=i/n runs a share of it
#
# RELEASING.md explains make release and make binaries.

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOTESTSUM   = gotest.tools/gotestsum@v1.13.0
GOVULNCHECK = golang.org/x/vuln/cmd/govulncheck@v1.1.4
GOLANGCI    = github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

# The oldest Go that go.mod accepts.
OLDEST_GO = go1.25.0

# The servers, as scripts/servers names them, with the newest of each kind first. The first tier runs
# in full on the first of these and samples the others.
SERVERS = redis-server-8.0,valkey-server-9.1,redis-server-6.2

# The servers of the second tier: everything runs on FULL, and a part on SAMPLED.
FULL    = redis-server-8.0,valkey-server-9.1,redis-server-6.2,valkey-server-8.0
SAMPLED = redis-server-7.0,valkey-server-8.1

# Packages whose tests start no server.
SERVERLESS = ./lock ./lock/driver ./scripts/... ./internal/lockstep ./internal/engine ./internal/telemetry \
	./internal/watchdog ./internal/wire

# A share of test-all: i of n.
PART = 1/1

# How long robustness runs on each server, and its first seed if it is given.
FOR  = 1m
SEED =

# How many mutants to draw, and from which seed.
MUTANTS = 100

comma = ,

# "long" has bench measure for longer and more often.
BENCH =

# Each module is built with the versions that its own go.mod requires. Only the modules that are published have a
# go.work, which replaces the library.
export GOWORK = off

export STATICCHECK GOTESTSUM GOVULNCHECK OLDEST_GO SERVERS FULL SAMPLED SERVERLESS

.PHONY: lint check test adapters costs test-all unit deps interop robustness soak mutants vuln golangci bench bench-test \
	release release-test binaries tidy

lint:
	./scripts/deps lint
	./scripts/tier lint

check: lint
	./scripts/tier check

test: deps
	./scripts/tier test

adapters: deps
	./scripts/tier adapters

costs: deps
	./scripts/tier costs

test-all: deps
	./scripts/tier all $(PART)

# One unit of test-all, as its log names it, for example UNIT="rlock valkey-server".
unit: deps
	./scripts/tier unit $(UNIT)

deps:
	./scripts/deps

# Every kind of lock beside those of Redisson, in Java, and plain locks beside those of
# redsync and redislock.
interop: deps
	./scripts/tier interop

# Histories of locks, elections and slots while everything fails, checked against a
# model. See robustness/doc.go.
robustness: deps
	REDLATCH_SERVERS=$$(./scripts/servers $(FULL)) REDLATCH_ROBUSTNESS_FOR=$(FOR) REDLATCH_ROBUSTNESS_SEED=$(SEED) \
		go test -race -count=1 -timeout 0 -v -run 'TestHistories|TestSlots' ./robustness/

# Robustness for an hour, or FOR, on each server.
soak:
	$(MAKE) robustness FOR=$(if $(filter 1m,$(FOR)),1h,$(FOR))

# Breaks production code at random and counts which breakages the tests notice.
mutants: deps
	go run ./scripts/mutants -n $(MUTANTS) $(if $(SEED),-seed $(SEED))

# Known vulnerabilities in what the module calls. It needs the Go vulnerability database.
vuln:
	go run $(GOVULNCHECK) ./...

# The linters of .golangci.yml, on all modules. Building them takes some minutes.
golangci:
	for module in . benchmarks interop examples/otel; do (cd $$module && go run $(GOLANGCI) run ./...) || exit; done
	for module in contrib/*/ cmd/*/; do (cd $$module && GOWORK= go run $(GOLANGCI) run ./...) || exit; done

# redlatch beside other libraries: it writes benchmarks/report, in some twenty minutes on two
# processors. See benchmarks/compare/scenario.go for what is measured.
bench:
	./scripts/deps bench
	./scripts/servers etcd-server-3.5 zookeeper-server
	$(MAKE) interop/redisson/4/target/built interop/curator/target/built
	cd benchmarks && REDLATCH_SERVERS=$$(../scripts/servers $(firstword $(subst $(comma), ,$(SERVERS)))) go run ./compare $(if $(filter long,$(BENCH)),-long)

# The programs of bench in Java, whose libraries Maven downloads.
interop/%/target/built: interop/%/pom.xml interop/redisson/pom.xml $(wildcard interop/src/interop/*.java)
	mvn -q -B -ntp -f interop/$* clean compile
	@touch $@

# Every benchmark once, and the tests of the comparison.
bench-test: deps
	./scripts/tier bench-test

# A release of all modules: one commit and its tags, here only.
release:
	go run ./scripts/release $(VERSION)

# The programs of a release for download, from its tags.
binaries:
	go run ./scripts/release -binaries dist $(VERSION)

# Makes a release of the working tree in a scratch repository, and uses it as others do.
release-test:
	./scripts/tier release-test

# Tidies the modules that are published. "go mod tidy" does not read go.work, so it has to find the library otherwise.
LIBRARY = github.com/redlatch/redlatch
tidy:
	go mod tidy
	for module in contrib/*/ cmd/*/; do (cd $$module && go mod edit -replace $(LIBRARY)=../.. && \
		go mod tidy && go mod edit -dropreplace $(LIBRARY)) || exit; done
