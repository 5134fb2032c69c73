# Shared by the guest builds: what they need, where they cache, how they name what they made.
# Sourced by guests/build; expects $here (this repository's guests/ directory).

cache=${FIRN_CACHE_DIR:-${HOME:?HOME is not set: set FIRN_CACHE_DIR}/.cache/firn}/guests
export LC_ALL=C TZ=UTC
umask 022

say() { printf 'guests: %s\n' "$*" >&2; }
die() { printf 'guests: error: %s\n' "$*" >&2; exit 1; }

# Names every missing command at once, with the package that brings it.
need() {
    local wanted="apt-get:apt dpkg-deb:dpkg cpio:cpio flock:util-linux sha256sum:coreutils"
    [ -n "${FIRN_GUEST_PROGRAMS-}" ] || wanted="$wanted cargo:cargo gcc:gcc"
    [[ $1 = kvm-host* ]] && wanted="$wanted mke2fs:e2fsprogs"
    [ "$1" = kvm-host-backports ] && wanted="$wanted xz:xz-utils"
    [ "$1" = full ] && wanted="$wanted mmdebstrap:mmdebstrap mke2fs:e2fsprogs qemu-img:qemu-utils"
    local missing="" pair
    for pair in $wanted; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
    done
    [ -z "$missing" ] || die "this machine lacks packages the $1 guest is built with: apt-get install$missing"
}

# Firn's guest programs, one static binary. Prints its path. FIRN_GUEST_PROGRAMS names one that is built already, for
# machines without a compiler.
guest_programs() {
    if [ -n "${FIRN_GUEST_PROGRAMS-}" ]; then
        [ -x "$FIRN_GUEST_PROGRAMS" ] || die "FIRN_GUEST_PROGRAMS=$FIRN_GUEST_PROGRAMS is no program"
        echo "$FIRN_GUEST_PROGRAMS"
        return
    fi
    local target=${CARGO_TARGET_DIR:-$here/../target} repository unit=$'\x1f'
    repository=$(cd "$here/.." && pwd)
    CARGO_ENCODED_RUSTFLAGS="-Ctarget-feature=+crt-static${unit}-Cstrip=symbols\
${unit}--remap-path-prefix=$repository=firn${unit}--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" \
        cargo build --quiet --release --package firn-guest --bin firn-guest --target x86_64-unknown-linux-gnu \
        --manifest-path "$repository/Cargo.toml" --target-dir "$target" >&2 \
        || die "the guest programs (crates/lab/firn-guest) do not build"
    echo "$target/x86_64-unknown-linux-gnu/release/firn-guest"
}

# Hash of files and of standard input: the key of a guest. Names do not count, contents and order do.
key_of() {
    { cat; local file; for file in "$@"; do sha256sum < "$file"; done; } | sha256sum | cut -c1-16
}

# Builds into a fresh directory and renames it into place, so that a directory that exists is whole.
#   publish KEY FUNCTION   calls FUNCTION DIR
publish() {
    local final="$cache/$guest-$1" work
    if [ ! -d "$final" ]; then
        work=$(mktemp -d "$cache/.$guest-XXXXXX")
        # shellcheck disable=SC2064  # the value of now is meant
        trap "rm -rf '$work'" EXIT
        say "building $guest ($1)"
        local start=$SECONDS
        "$2" "$work"
        chmod 755 "$work"
        mv "$work" "$final"
        trap - EXIT
        forget_old
        say "built $guest in $((SECONDS - start)) s"
    fi
    touch "$final"
    echo "$final"
}

# Guests not used for two weeks (each use touches its directory), and what broken builds left.
forget_old() {
    find "$cache" -mindepth 1 -maxdepth 1 -type d \
        \( -name "$guest-????????????????" -mtime +14 -o -name ".$guest-??????" -mtime +1 \) -exec rm -rf {} +
}

# Packs a directory as an initramfs, the same bytes every time: sorted, owned by root, times and inode numbers fixed.
pack_initramfs() {
    chmod -R u=rwX,go=rX "$1"
    find "$1" -exec touch --no-dereference --date=@0 {} +
    (cd "$1" && find . -print0 | sort -z | cpio --null --create --format=newc --owner=0:0 --reproducible --quiet)
}
