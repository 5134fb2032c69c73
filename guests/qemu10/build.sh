# QEMU 10 beside the machine's own: Debian's backport unpacked into a prefix, not installed, because installing it
# replaces the stock QEMU.
#
#   qemu-system-x86_64   what to run: the real one below with its own libraries, firmware and modules
#   usr/, lib/           the prefix
#
# The stock QEMU's firmware must not get in: QEMU looks in folders that were compiled into it, finds the other version's
# files there and takes them without a word, so the wrapper names the prefix's folders.
# Sourced by guests/build. Needs no root. Debian 12 only: later releases have QEMU 10 as their own.

qemu10_packages="qemu-system-x86"

build_cached() {
    local key
    prepare_apt
    release=$(stable_release)
    in_backports prepare_backports "$firn_sources"
    key=$(in_backports resolve_packages -t "$release-backports" "$qemu10_packages" |
        key_of "$here/build" "$here"/lib/*.sh "$here"/qemu10/*)
    publish "$key" qemu10_into
}

qemu10_into() {
    local out=$1 unpacked
    unpacked="$out/unpacked"
    in_backports unpack_packages "$unpacked" -t "$release-backports" "$qemu10_packages"
    mkdir -p "$out"/{lib64,usr/bin,usr/share,usr/lib/ipxe,usr/lib/x86_64-linux-gnu}
    copy_program "$unpacked" usr/bin/qemu-system-x86_64 "$out"
    drop_c_library "$out"
    cp -a "$unpacked/usr/lib/x86_64-linux-gnu/qemu" "$out/usr/lib/x86_64-linux-gnu/"
    cp -a "$unpacked/usr/share/qemu" "$unpacked/usr/share/seabios" "$out/usr/share/"
    cp -a "$unpacked/usr/lib/ipxe/qemu" "$out/usr/lib/ipxe/"
    rm -rf "$unpacked"
    cp "$here/qemu10/qemu-system-x86_64" "$out/"
    chmod 755 "$out/qemu-system-x86_64"
    in_backports resolve_packages -t "$release-backports" "$qemu10_packages" > "$out/packages"
    "$out/qemu-system-x86_64" --version >&2 || die "QEMU 10 does not run on this machine"
}

# The program is started by the machine's own loader, which fits no C library but its own.
drop_c_library() {
    local name
    rm -r "$1/lib64"
    for name in libc.so.6 libm.so.6 libmvec.so.1 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2 libutil.so.1 libanl.so.1; do
        rm -f "$1/lib/x86_64-linux-gnu/$name"
    done
}
