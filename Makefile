# Everything here works in a fresh clone on a machine with nothing but cargo: scripts/services installs the rest (as root
# on Debian; elsewhere it says what is missing) and starts servers of this checkout only, on 127.0.0.1.

.DEFAULT_GOAL := help
.PHONY: help demo test soak faults controls bench-latency build fmt lint services clean-services

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1 \2/p' $(MAKEFILE_LIST) | while read -r name text; do printf '%-16s%s\n' "$$name" "$$text"; done

demo: services build ## publish orders, kill the bridge, and show what each broker's own client received
	scripts/demo

test: services build ## all tests, against real servers
	scripts/test

soak: services build ## the tests of the stream for hours' worth of trouble: 300 joins, ten minutes without a broker
	LB_SOAK=1 scripts/test --test faults wal

faults: services build ## the matrix of faults, more than 1,200 of them, in about an hour, and 100 stops under load; writes docs/reliability.md
	scripts/test --test faults -- --include-ignored --nocapture matrix::every_cell drain::a_hundred

controls: services ## the test of the tests: bridges that break one rule each, and the verdict that must name it
	scripts/services build-deps
	scripts/test --features break-rules --test faults controls::

bench-latency: services ## from commit to consumer, for each source and broker; with ARGS="--quick" or "--help"
	scripts/services build-deps
	set -a && . target/services/env && cargo bench --locked $(BENCH_FLAGS) --bench latency -- $(ARGS)

build: ## the bridge, target/debug/lanebridge
	scripts/services build-deps
	cargo build --locked

fmt: ## format all sources
	cargo fmt

lint: ## what CI checks besides tests
	scripts/lint

services: ## install what is missing, and start Postgres, Kafka, NATS and Redis
	scripts/services up

clean-services: ## stop them and delete their data
	scripts/services down --purge
