#!/usr/bin/env bash
# RUSTC_WRAPPER of scripts/fuzz.sh: compiles the crates of this repository with coverage counters for libFuzzer, and with
# AddressSanitizer. Dependencies are compiled without both, so that only the code under test counts as coverage.
case ${CARGO_MANIFEST_DIR:-/registry/} in
  */registry/*) exec "$@" ;;
esac
# Allows -Z flags in a stable compiler.
export RUSTC_BOOTSTRAP=1
exec "$@" -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1
