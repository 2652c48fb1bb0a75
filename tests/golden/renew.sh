#!/bin/sh
# Writes the golden texts anew from a build: tests/golden/renew.sh build. Read the difference before you commit it.
set -eu
build=$(cd "${1:-build}" && pwd)
cd "$build" && WHALE_RENEW_GOLDEN=1 tests/unit_tests --test-case='golden*'
git -C "$build/.." diff --stat -- tests/golden
