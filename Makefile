# The servers the tests run on; all of them must be installed.
SERVERS = redis-server,valkey-server
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

# For how long robustness runs on each server, and its first seed if it is given.
FOR = 1m
SEED =

.PHONY: test deps lint interop bench cost robustness

# Everything that must hold: lint, and all tests on all servers.
test: deps lint
	REDLATCH_SERVERS=$(SERVERS) go test -race -count=1 -p 1 -timeout 40m ./...
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

# What a lock costs here, beside the floor: the same scripts and nothing else.
bench:
	cd benchmarks && go test -run '^$$' -bench . -benchtime 2s .

# What locks cost while they are held or waited for: memory and processor time.
cost:
	cd benchmarks && go run ./cost
