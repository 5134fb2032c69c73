# A guest that knows that it is a copy: its kernel has a driver for the VM generation ID (Debian's kernel for all machines,
# because its cloud kernel 6.1 has none), and QEMU's guest agent runs in it. It boots in seconds, and shows what should differ
# between copies when it is asked: random numbers, the time, keys of TLS, its machine ID (init).
#
#   kernel      Debian's kernel
#   initrd      busybox, drivers for virtio and ext4, qemu-ga, date, openssl, init, and the programs become and show-id
#
# Sourced by guests/build. Needs no root.

identity_packages="linux-image-amd64 busybox-static qemu-guest-agent coreutils openssl"

build_cached() {
    local key
    prepare_apt
    # shellcheck disable=SC2086  # a list of words
    key=$(resolve_packages $identity_packages |
        key_of "$here/build" "$here"/lib/*.sh "$here"/identity/*)
    publish "$key" identity_into
}

identity_into() {
    local out=$1 unpacked root
    unpacked="$out/unpacked"; root="$out/root"
    # shellcheck disable=SC2086  # a list of words
    unpack_packages "$unpacked" $identity_packages
    grep --quiet '^CONFIG_VMGENID=y' "$unpacked"/boot/config-* || die "the kernel has no driver for vmgenid"
    make_root "$root"
    mkdir -p "$root/usr/sbin" "$root/var/run"
    cp "$unpacked/bin/busybox" "$root/bin/busybox"
    copy_modules "$unpacked" "$root"
    copy_modules "$unpacked" "$root" lib/ext4 crc16 mbcache jbd2 crc32c_generic ext4
    copy_program "$unpacked" usr/sbin/qemu-ga "$root"
    copy_program "$unpacked" bin/date "$root"
    copy_program "$unpacked" usr/bin/openssl "$root"
    cp "$here/identity/init" "$root/init"
    cp "$here/identity/become" "$here/identity/show-id" "$root/bin"
    chmod 755 "$root/init" "$root/bin/busybox" "$root/bin/become" "$root/bin/show-id"
    pack_initramfs "$root" > "$out/initrd"
    cp "$unpacked"/boot/vmlinuz-* "$out/kernel"
    # shellcheck disable=SC2086  # a list of words
    resolve_packages $identity_packages > "$out/packages"
    rm -rf "$unpacked" "$root"
}
