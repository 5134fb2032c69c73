# The small guest: Debian's cloud kernel and an initramfs with busybox, Redis and Firn's guest programs.
# Sourced by guests/build. Needs no root: packages are unpacked, not installed.

small_packages="linux-image-cloud-amd64 busybox-static redis-server"

build_cached() {
    local programs key
    programs=$(guest_programs)
    prepare_apt
    key=$(resolve_packages $small_packages |
        key_of "$here/build" "$here"/lib/*.sh "$here"/small/* "$programs")
    # shellcheck disable=SC2317  # called by publish
    make_small() { small_into "$1" "$programs"; }
    publish "$key" make_small
}

small_into() {
    local out=$1 programs=$2 unpacked root
    unpacked="$out/unpacked"; root="$out/root"
    unpack_packages "$unpacked" $small_packages
    make_root "$root"
    cp "$unpacked/bin/busybox" "$root/bin/busybox"
    cp "$programs" "$root/bin/firn-guest"
    copy_modules "$unpacked" "$root"
    copy_program "$unpacked" usr/bin/redis-server "$root"
    copy_program "$unpacked" usr/bin/redis-benchmark "$root"
    cp "$here/small/init" "$root/init"
    cp "$here"/small/{inittab,redis.conf,once} "$root/etc/"
    chmod 755 "$root/init" "$root/bin/"*
    pack_initramfs "$root" > "$out/initrd"
    cp "$unpacked"/boot/vmlinuz-* "$out/kernel"
    resolve_packages $small_packages > "$out/packages"
    rm -rf "$unpacked" "$root"
}
