# The first-level guest: a machine in which /dev/kvm works, whatever the host has. QEMU's TCG emulates AMD's SVM, so a
# Debian kernel inside it offers KVM to a second QEMU, as slow as emulation is and as correct as hardware.
#
#   kernel      Debian's cloud kernel (6.1 on Debian 12)
#   initrd      busybox and the virtio drivers: mounts the disk, goes on from there (init)
#   disk.img    ext4, read-only: busybox, kvm-amd, qemu-system-x86_64 with its libraries and firmware, start
#
# What a run needs beside these (Firn, a second-level guest) comes in as a tar on a second disk: see start.
# Sourced by guests/build. Needs no root.

kvm_host_packages="linux-image-cloud-amd64 busybox-static qemu-system-x86"
# In the order they must be inserted.
kvm_host_modules="irqbypass kvm kvm-amd"

build_cached() {
    local key
    prepare_apt
    # shellcheck disable=SC2086  # a list of words
    key=$(resolve_packages $kvm_host_packages |
        key_of "$here/build" "$here"/lib/*.sh "$here"/kvm-host/*)
    publish "$key" kvm_host_into
}

kvm_host_into() {
    local out=$1 unpacked
    unpacked="$out/unpacked"
    # shellcheck disable=SC2086  # a list of words
    unpack_packages "$unpacked" $kvm_host_packages
    kvm_host_initrd "$unpacked" "$out/initrd-root"
    pack_initramfs "$out/initrd-root" > "$out/initrd"
    kvm_host_root "$unpacked" "$out/root"
    kvm_host_disk "$out/root" "$out/disk.img"
    cp "$unpacked"/boot/vmlinuz-* "$out/kernel"
    # shellcheck disable=SC2086  # a list of words
    resolve_packages $kvm_host_packages > "$out/packages"
    rm -rf "$unpacked" "$out/initrd-root" "$out/root"
}

kvm_host_initrd() {
    make_root "$2"
    mkdir -p "$2/disk"
    cp "$1/bin/busybox" "$2/bin/busybox"
    copy_modules "$1" "$2"
    cp "$here/kvm-host/init" "$2/init"
    chmod 755 "$2/init" "$2/bin/busybox"
}

kvm_host_root() {
    local unpacked=$1 root=$2 name
    make_root "$root"
    mkdir -p "$root"/{root,sbin,usr/sbin,usr/share,lib/modules}
    cp "$unpacked/bin/busybox" "$root/bin/busybox"
    for name in $("$unpacked/bin/busybox" --list); do
        [ -e "$root/bin/$name" ] || ln -s busybox "$root/bin/$name"
    done
    ln -s ../tmp "$root/var/tmp"
    copy_kvm_modules "$unpacked" "$root"
    copy_program "$unpacked" usr/bin/qemu-system-x86_64 "$root"
    copy_firmware "$unpacked" "$root"
    cp "$here/kvm-host/start" "$root/sbin/init"
    chmod 755 "$root/sbin/init" "$root/bin/busybox"
}

copy_kvm_modules() {
    local name number=50
    for name in $kvm_host_modules; do
        copy_module "$1" "$name" "$2/lib/modules/$number-$name.ko"
        number=$((number + 1))
    done
}

# QEMU's own modules stay out: KVM is built in, TCG (accel-tcg-*.so) is not wanted here.
copy_firmware() {
    cp -a "$1/usr/share/seabios" "$1/usr/share/qemu" "$2/usr/share/"
    rm -rf "$2"/usr/share/qemu/{keymaps,firmware,edk2*,u-boot*,openbios*,skiboot*,s390*,opensbi*,hppa*,palcode*,qemu_vga*,slof*,vof*}
    mkdir -p "$2/usr/lib/ipxe"
    cp -a "$1/usr/lib/ipxe/qemu" "$2/usr/lib/ipxe/"
}

# Times, owner, UUIDs and hash seed fixed, so that the same packages give the same bytes.
kvm_host_disk() {
    local bytes
    chmod -R u=rwX,go=rX "$1"
    find "$1" -exec touch --no-dereference --date=@0 {} +
    bytes=$(du --summarize --bytes "$1" | cut -f1)
    truncate -s $((bytes * 5 / 4 + (16 << 20))) "$2"
    E2FSPROGS_FAKE_TIME=1 PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -O ^has_journal -m 0 \
        -U 6669726e-0000-4000-8000-6b766d2d686f -E "root_owner=0:0,hash_seed=6669726e-0000-4000-8000-000000000001" \
        -d "$1" "$2"
}
