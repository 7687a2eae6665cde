# The servers the tests run on; all of them must be installed.
SERVERS = redis-server,valkey-server
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

# For how long robustness runs on each server, and its first seed if it is given.
FOR = 1m
SEED =

# "long" has bench measure for longer and more often.
BENCH =

.PHONY: test deps lint interop bench bench-test robustness

# Everything that must hold: lint, and all tests on all servers.
test: deps lint
	REDLATCH_SERVERS=$(SERVERS) go test -race -count=1 -p 1 -timeout 40m ./...
	$(MAKE) bench-test
	$(MAKE) interop
	$(MAKE) robustness

deps:
	./scripts/deps

lint:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo 'not formatted: run gofmt -w .'; exit 1; }
	go vet ./...
	go run $(STATICCHECK) ./...
	luacheck --no-color -q .
	cd benchmarks && go vet ./...
	cd interop && go vet ./...

# Beside others: all locks with those of Redisson, in Java; plain locks with those of
# redsync and redislock.
interop: deps
	mvn -q -B -ntp -f interop/redisson clean compile
	cd interop && REDLATCH_SERVERS=$(SERVERS) go test -race -count=1 -parallel 8 -timeout 20m ./...

# Histories of locks that are contended for while everything fails, checked
# against a model. See robustness/doc.go.
robustness: deps
	REDLATCH_SERVERS=$(SERVERS) REDLATCH_ROBUSTNESS_FOR=$(FOR) REDLATCH_ROBUSTNESS_SEED=$(SEED) \
		go test -race -count=1 -timeout 0 -v -run TestHistories ./robustness/

# redlatch beside other libraries: it writes benchmarks/report, in some ten minutes on two
# processors. See benchmarks/compare/scenario.go for what is measured.
bench:
	./scripts/deps bench
	mvn -q -B -ntp -f interop/redisson -pl 4 clean compile
	cd benchmarks && go run ./compare $(if $(filter long,$(BENCH)),-long)

# What measures, in short.
bench-test: deps
	cd benchmarks && go test -count=1 -timeout 5m ./...
