# SPDX-License-Identifier: MIT
# The few words a newcomer types. The build itself is CMake's (CMakePresets.json); CC in the environment picks
# another compiler, e.g. CC=clang make test.
.PHONY: build demo test test-long test-fresh lab lint install uninstall clean help
.NOTPARALLEL:

build:
	@scripts/dependencies.sh build
	@scripts/build.sh release flashmla_product

demo: build
	@scripts/demo.sh

# Where missing packages cannot be installed, their tests are skipped, and the last line says so.
test: build
	@scripts/dependencies.sh test || true
	@scripts/build.sh release
	@scripts/test.sh --preset release -LE long

# Needs the build of make test.
test-long:
	@scripts/test.sh --preset release -L long

test-fresh:
	@scripts/test-fresh.sh

lab:
	@scripts/lab.sh build/lab

lint:
	@scripts/dependencies.sh lint
	@scripts/lint.sh

install: build
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' scripts/install.sh install

uninstall:
	@scripts/install.sh uninstall

clean:
	rm -rf build demo dist

help:
	@echo 'make             build the library and the command into build/release'
	@echo 'make demo        compute, check, time and draw one decode batch; leaves its files in demo/'
	@echo 'make test        build and run the tests'
	@echo 'make test-long   after it: those that build the project in other ways, stress, and more of checkattn'
	@echo 'make test-fresh  make demo and make test inside a minimal Debian tree (root or sudo, network)'
	@echo 'make lab         compile the programs of lab/ into build/lab; they need nvcc, and a Hopper GPU to run'
	@echo 'make lint        clang-format, clang-tidy, cppcheck, shellcheck, black, mypy'
	@echo 'make install     install it under PREFIX (/usr/local), staged in DESTDIR if set; make uninstall removes it'
	@echo 'make clean       remove build/, demo/ and dist/'
	@echo
	@echo 'With nvcc it compiles kernels for the GPUs of this machine; FMLA_CUDA_ARCHS=all or FMLA_CUDA=OFF in the'
	@echo 'environment chooses others. The build folder keeps the choice.'
	@echo 'Missing Debian packages are installed as root or with passwordless sudo; else their names are printed.'
