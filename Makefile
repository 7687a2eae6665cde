# The servers the tests run on; all of them must be installed.
SERVERS = redis-server,valkey-server
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: test deps lint bench

# Everything that must hold: lint, and all tests on all servers.
test: deps lint
	REDLATCH_SERVERS=$(SERVERS) go test -race -count=1 -timeout 30m ./...

deps:
	./scripts/deps

lint:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo 'not formatted: run gofmt -w .'; exit 1; }
	go vet ./...
	go run $(STATICCHECK) ./...
	cd benchmarks && go vet ./...

# What a lock costs here, beside the floor: the same scripts and nothing else.
bench:
	cd benchmarks && go test -run '^$$' -bench . -benchtime 2s .
