#!/usr/bin/env bash
# Installs the build folder $1 into a prefix, moves the tree elsewhere, and uses it there: the command line, and examples/c/mlp.c
# built with pkg-config and with CMake.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
DESTDIR=$folder/staged meson install -C "$1" --no-rebuild --quiet >"$folder/log" 2>&1 || { tail -30 "$folder/log"; exit 1; }
prefix=$(meson introspect "$1" --buildoptions | python3 -c 'import json, sys; print(next(o["value"] for o in json.load(sys.stdin) if o["name"] == "prefix"))')
mkdir "$folder/moved here"
moved="$folder/moved here/whale"
mv "$folder/staged$prefix" "$moved"
rm -rf "$folder/staged"
unset LD_LIBRARY_PATH WHALE_LIBRARY PYTHONPATH
cd "$folder"

grep -q pcfiledir "$moved"/lib/*/pkgconfig/whale.pc || { echo "this build folder is older than the option: meson configure $1 -Dpkgconfig.relocatable=true"; exit 1; }
if grep -rIlF -e "$folder" -e "$source" "$moved"/lib/*/pkgconfig "$moved"/lib/*/cmake; then echo "a path of the machine that built it"; exit 1; fi
for file in "$moved"/bin/whale "$moved"/lib/*/libwhale.so.*.*.* "$moved"/lib/*/libwhale_cpu.so "$moved"/lib/*/libwhale_[up]*x.so; do
  [ -e "$file" ] || continue # built without
  rpath=$(readelf -d "$file" | sed -n 's/.*R.*PATH.*\[\(.*\)\]/\1/p')
  case $rpath in ''|'$ORIGIN'*) ;; *) echo "$file looks for libraries in $rpath"; exit 1 ;; esac
done

tool="$moved/bin/whale"
"$tool" devices | grep -q '^cpu *available' || { "$tool" devices; echo "libwhale_cpu.so is not found beside libwhale.so"; exit 1; }
"$tool" model mlp --layers 2 --dim 8 --hidden 16 --classes 3 --batch 10 -o mlp.whale >/dev/null
"$tool" run mlp.whale --devices cpu:2 --steps 2 --quiet >/dev/null
echo "the command line runs where it was moved to"

pc=$(echo "$moved"/lib/*/pkgconfig)
flags=$(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs whale)
eval "lib=$(PKG_CONFIG_PATH=$pc pkg-config --variable=libdir whale)" # spaces are escaped
[ "$(realpath "$lib")" = "$(realpath "$pc/..")" ] || { echo "pkg-config says $lib"; exit 1; }
eval "cc \"$source/examples/c/mlp.c\" $flags -lm \"-Wl,-rpath,$lib\" -o mlp-pkg-config"
./mlp-pkg-config cpu:2 | tail -1
echo "built with pkg-config"

mkdir project
cp "$source/examples/c/mlp.c" project/
cat >project/CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(mlp C)
find_package(whale 0.2 REQUIRED)
add_executable(mlp mlp.c)
target_link_libraries(mlp PRIVATE whale::whale m)
CMAKE
cmake -S project -B project/build -DCMAKE_PREFIX_PATH="$moved" >cmake.log 2>&1 || { cat cmake.log; exit 1; }
cmake --build project/build >cmake.log 2>&1 || { cat cmake.log; exit 1; }
project/build/mlp cpu:2 | tail -1
echo "built with CMake"
sed -i 's/whale 0.2/whale 0.9/' project/CMakeLists.txt
if cmake -S project -B project/other -DCMAKE_PREFIX_PATH="$moved" >cmake.log 2>&1; then echo "CMake took another version"; exit 1; fi
