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

# The release this machine's apt is configured for, which must be the one whose backports have QEMU 10.
stable_release() {
    local release
    release=$(awk '$4 ~ /^[a-z]+$/ { print $4; exit }' "$firn_sources")
    [ "$release" = bookworm ] || die "QEMU 10 is taken from Debian 12's backports; this machine is configured for ${release:-no release}"
    echo "$release"
}

# Runs a function with a private apt of its own, which other guests don't see. Bash looks variables up by caller.
in_backports() {
    local cache="$cache/backports"
    local firn_sources="$cache/apt/sources.list"
    "$@"
}

# Adds the backports of the same mirror to the sources of the given file.
prepare_backports() {
    [ "$refresh" = yes ] || [ ! -s "$firn_sources" ] || return 0
    say "reading package lists of $release-backports"
    mkdir -p "$cache/apt"
    { cat "$1"; sed -n "s/ $release / $release-backports /p" "$1"; } > "$firn_sources"
    rm -f "$cache"/apt/resolved-*
    private_apt apt-get update -qq >&2 \
        || { rm -f "$firn_sources"; die "the configured mirror has no $release-backports that apt can read"; }
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
