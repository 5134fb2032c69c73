#!/bin/sh
# Installs libfirnapp below a prefix: install.sh PREFIX [DIRECTORY OF THE BUILT LIBRARIES]
set -eu
prefix=${1:?usage: install.sh PREFIX [DIRECTORY]}
here=$(cd "$(dirname "$0")" && pwd)
built=${2:-$here/../../target/release}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml")
mkdir -p "$prefix/lib/pkgconfig" "$prefix/include" "$prefix/share/man/man3"
cp "$built/libfirnapp.so" "$built/libfirnapp.a" "$prefix/lib/"
cp "$here/include/firnapp.h" "$prefix/include/"
cp "$here/man/firnapp.3" "$prefix/share/man/man3/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/firnapp.pc.in" > "$prefix/lib/pkgconfig/firnapp.pc"
