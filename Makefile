# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
# Both install what they need (scripts/setup), as root or with sudo.
# `make install` and `make deb` install Firn: docs/manual/src/install.md.

.PHONY: demo demo-app demo-cluster test test-all test-manual test-install test-platforms test-kvm test-kvm-new test-qemu10 bench
.PHONY: setup setup-build setup-demo build release install uninstall deb guest lint fmt doc clean

CARGO ?= cargo
BUILT = $(or $(CARGO_TARGET_DIR),target)

# Where `make install` installs: packaging/install describes these variables. Root is needed for most prefixes.
PREFIX ?= /usr/local
INSTALL = $(if $(DESTDIR)$(shell test -w $(PREFIX) && echo own),,$(AS_ROOT)) env PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) \
	LIBDIR=$(LIBDIR) ZSHDIR=$(ZSHDIR) packaging/install

# What follows page faults or throttles disks needs root; only that gets it. Everything is built as who you are.
ifneq ($(shell id -u),0)
AS_ROOT := sudo -E env PATH=$(PATH) HOME=$(HOME)
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER := $(AS_ROOT)
endif

# Boots a real VM with Redis under load, checkpoints it live, kills it, restores it in each mode.
demo: setup-demo build guest
	$(AS_ROOT) ./target/release/firn-lab demo

# Builds a memcached that can be killed (examples/memcached), and kills it under load.
demo-app: setup-demo build
	./target/release/firn-lab demo-app

# Three hosts, each a network namespace; Redis and its replica in a VM each, under load. One host is killed, both VMs go on at another.
# MEMBERSHIP=embedded|etcd|both: what hosts agree by.
MEMBERSHIP ?= both
demo-cluster: setup-demo build guest
	$(AS_ROOT) ./target/release/firn-lab demo-cluster --membership $(MEMBERSHIP)

# Unit tests, and end-to-end tests on real VMs. TESTS="NAME..." runs only these. One build for all, with what tests start but
# are not linked with: QEMU loads libfirn_stores.so and memcached libfirnapp.so.
test: setup guest
	$(CARGO) build --profile tests --workspace --lib --bins --tests
	scripts/run-tests $(TESTS)

# The same, with the whole of each long walk; `make test` takes a part of it.
test-all: export FIRN_ALL = 1
test-all: test

# The end-to-end tests under KVM on an older kernel and on a newer one, in a machine that QEMU emulates, and with QEMU 10.
test-platforms: setup
	scripts/test-platforms

test-kvm test-kvm-new test-qemu10: test-%: setup
	scripts/test-platforms $*

# Runs the transcripts of README and of the manual, with the programs that would be installed.
test-manual: release guest
	scripts/setup manual
	$(AS_ROOT) env FIRN_BIN=$(BUILT)/release scripts/test-manual

# Makes a package, and installs and removes it in a clean Debian 12 and 13, with the quick start in between.
test-install: setup deb guest
	scripts/setup manual
	scripts/test-install

# Every experiment, with few repetitions, and a page of their figures, target/lab/measured.md.
# `firn-lab run NAME` runs one in full.
# Those that break something on purpose need a `firn` with fault points.
bench: setup build guest
	$(CARGO) build --release -p firn --features armed
	@mkdir -p target/lab
	$(AS_ROOT) ./target/release/firn-lab run all --quick; status=$$?; \
	./target/release/firn-lab publish --page target/lab/measured.md; exit $$status

# All that is needed; to build; to build and for demonstrations.
setup:
	@scripts/setup

setup-build:
	@scripts/setup build

setup-demo:
	@scripts/setup build demo

build: setup-build
	$(CARGO) build --release --workspace

# What is installed: programs without fault points (the feature `armed`), which those of `make bench` have.
release: setup-build
	$(CARGO) build --release -p firn -p firn-objects -p firn-agent -p firn-app-backup -p firn-stores -p firn-app-c

# Builds as the user who calls it; only copies the files as root.
install: release
	$(INSTALL) $(BUILT)/release

uninstall:
	$(INSTALL) --uninstall

deb: release
	packaging/deb $(BUILT)/release $(BUILT)

guest: setup-demo
	guests/build small

# What CI asks for besides: needs rustfmt and clippy, which Debian's own toolchain comes without.
lint: setup
	scripts/tidy
	scripts/check-dependencies
	scripts/check-imports
	$(CARGO) fmt --all --check
	$(CARGO) clippy --profile tests --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --profile tests --workspace --no-deps --quiet

fmt:
	$(CARGO) fmt --all

clean:
	$(CARGO) clean
