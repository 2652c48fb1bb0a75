# Sourced by quickstart and check: what both need from the system, and a build. Everything here is safe to run again.
#   install_packages NAME...   apt packages that are missing (sudo when not root; --no-apt skips)
#   make_venv DIR NAME...      a private virtual environment with these Python packages
#   build_in DIR MESON_ARG...  configures when new or when the arguments are others than last time, then builds
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD_PACKAGES="g++ meson ninja-build cmake pkg-config python3 python3-venv libdnnl-dev libucx-dev libhwy-dev libhwloc-dev libfmt-dev libflatbuffers-dev
  flatbuffers-compiler libcli11-dev nlohmann-json3-dev"
say() { printf '\n== %s\n' "$*"; }

install_packages() {
  local missing=() each
  for each in "$@"; do dpkg-query -W -f='${Status}' "$each" 2>/dev/null | grep -q 'ok installed' || missing+=("$each"); done
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ -n "${NO_APT:-}" ]; then
    echo "missing Debian packages: ${missing[*]}"; return 1
  fi
  say "installing Debian packages: ${missing[*]}"
  local sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

make_venv() {
  local dir=$1; shift
  [ -x "$dir/bin/python" ] || python3 -m venv "$dir"
  "$dir/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

build_in() {
  local dir=$1; shift
  if [ ! -f "$dir/build.ninja" ]; then
    meson setup "$dir" "$ROOT" "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; return 1; }
  elif [ "$(cat "$dir/arguments" 2>/dev/null)" != "$*" ]; then
    meson configure "$dir" "$@"
  fi
  echo "$*" >"$dir/arguments"
  # shellcheck disable=SC2086
  ninja -C "$dir" ${BUILD_JOBS:+-j"$BUILD_JOBS"} ${BUILD_TARGETS:-}
}
