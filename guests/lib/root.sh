# The root directory of an initramfs: folders, kernel modules, programs with the libraries they load.

# In the order they must be inserted. The cloud kernel has virtio as modules, ext4 and the serial port built in.
guest_modules="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk failover
    net_failover virtio_net virtio_console virtio-rng virtio_balloon"

make_root() {
    mkdir -p "$1"/{bin,dev,etc,lib,lib64,proc,run,sbin,sys,tmp,usr/bin,var/log}
    printf 'root::0:0:root:/:/bin/sh\n' > "$1/etc/passwd"
    printf 'root:x:0:\n' > "$1/etc/group"
    ln -s busybox "$1/bin/sh"
}

# Into ROOT/lib/modules, numbered in the order of $guest_modules; or into another FOLDER, those named.
#   copy_modules UNPACKED ROOT [FOLDER NAME...]
copy_modules() {
    local unpacked=$1 root=$2 folder=${3:-lib/modules} name number=10
    shift "$(($# > 3 ? 3 : $#))"
    mkdir -p "$root/$folder"
    for name in ${*:-$guest_modules}; do
        copy_module "$unpacked" "$name" "$root/$folder/$number-$name.ko"
        number=$((number + 1))
    done
}

# Newer kernels' modules are compressed, and more of them are built in.
#   copy_module UNPACKED NAME FILE
copy_module() {
    local file modules="$1/lib/modules"
    file=$(find "$modules" -name "$2.ko" -o -name "$2.ko.xz" | head -n 1)
    case $file in
        *.ko) cp "$file" "$3" ;;
        *.xz) xz --decompress --stdout "$file" > "$3" ;;
        *) grep --quiet "/$2[.]ko$" "$modules"/*/modules.builtin || die "the kernel package has no module $2" ;;
    esac
}

# A program and, at the places it looks for them, the libraries it loads. The unpacked loader itself lists them, so
# nothing of the building machine gets in.
#   copy_program UNPACKED PROGRAM ROOT
copy_program() {
    local folders loader="$1/lib64/ld-linux-x86-64.so.2" library
    folders="$1/lib/x86_64-linux-gnu:$1/usr/lib/x86_64-linux-gnu"
    [ -e "$loader" ] || loader="$1/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    mkdir -p "$3/lib/x86_64-linux-gnu"
    cp "$1/$2" "$3/$2"
    cp "$loader" "$3/lib64/ld-linux-x86-64.so.2"
    for library in $("$loader" --library-path "$folders" --list "$1/$2" | awk '$2 == "=>" { print $3 }'); do
        cp "$library" "$3/lib/x86_64-linux-gnu/"
    done
}
