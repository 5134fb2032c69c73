# The full guest: the small guest's kernel, an initrd with Firn's guest programs that mounts a disk, and the disk.
# Sourced by guests/build.
#
# The disk takes minutes and has none of Firn in it, so it is cached by itself and outlives changes of the programs.

. "$here/full/disk.sh"

full_initrd_packages="linux-image-cloud-amd64 busybox-static dmsetup"

build_cached() {
    local programs key disk_key disk
    programs=$(guest_programs)
    prepare_apt
    disk_key=$(resolve_packages $full_packages |
        key_of "$here/full/disk.sh" "$here/full/make-disk" $(find "$here/full/files" -type f | sort))
    disk=$(guest=full-disk publish "$disk_key" full_disk)
    key=$({ echo "$disk_key"; resolve_packages $full_initrd_packages; } |
        key_of "$here/full/build.sh" "$here/full/stub-init" "$here/lib/root.sh" "$programs")
    # shellcheck disable=SC2317  # called by publish
    make_full() { full_initrd "$1" "$programs"; ln "$disk/disk.qcow2" "$1/disk.qcow2"; }
    publish "$key" make_full
}

full_initrd() {
    local out=$1 programs=$2 unpacked="$1/unpacked" root="$1/root"
    unpack_packages "$unpacked" $full_initrd_packages
    make_root "$root"
    cp "$unpacked/bin/busybox" "$root/bin/busybox"
    cp "$programs" "$root/bin/firn-guest"
    copy_modules "$unpacked" "$root"
    copy_modules "$unpacked" "$root" lib/snapshot-modules brd dm-mod dm-bufio dm-snapshot
    copy_program "$unpacked" sbin/dmsetup "$root"
    cp "$here/full/stub-init" "$root/init"
    chmod 755 "$root/init" "$root/bin/"*
    pack_initramfs "$root" > "$out/initrd"
    cp "$unpacked"/boot/vmlinuz-* "$out/kernel"
    resolve_packages $full_initrd_packages > "$out/packages"
    rm -rf "$unpacked" "$root"
}
