#!/bin/sh
# Installs libfirnapp below a prefix: install.sh PREFIX [DIRECTORY OF THE BUILT LIBRARIES]
# DESTDIR is put before each path, for packages. LIBDIR is the directory of the libraries, PREFIX/lib by default.
set -eu
prefix=${1:?usage: install.sh PREFIX [DIRECTORY]}
here=$(cd "$(dirname "$0")" && pwd)
built=${2:-$here/../../../target/release}
libdir=${LIBDIR:-$prefix/lib}
root=${DESTDIR-}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' "$here/../../../Cargo.toml")

install -d -m 755 "$root$libdir/pkgconfig" "$root$prefix/include" "$root$prefix/share/man/man3"
# A program that is linked with -lfirnapp loads the library by its SONAME, which build.rs sets.
install -m 644 "$built/libfirnapp.so" "$root$libdir/libfirnapp.so.$version"
ln -sf "libfirnapp.so.$version" "$root$libdir/libfirnapp.so.1"
ln -sf libfirnapp.so.1 "$root$libdir/libfirnapp.so"
install -m 644 "$built/libfirnapp.a" "$root$libdir/libfirnapp.a"
install -m 644 "$here/include/firnapp.h" "$root$prefix/include/firnapp.h"
install -m 644 "$here/man/firnapp.3" "$root$prefix/share/man/man3/firnapp.3"
sed -e "s|@PREFIX@|$prefix|" -e "s|@LIBDIR@|$libdir|" -e "s|@VERSION@|$version|" "$here/firnapp.pc.in" > "$root$libdir/pkgconfig/firnapp.pc"
chmod 644 "$root$libdir/pkgconfig/firnapp.pc"
