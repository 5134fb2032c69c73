# The disk of the full guest: PostgreSQL with a pgbench database, nginx with generated pages, a JVM, compilers with
# something to compile, a player with something to play, Open MPI, sysbench and stress-ng, Perl, bzip2 and Xalan.
#
# mmdebstrap installs the packages as root, or as an ordinary user through user namespaces (package uidmap). The disk
# is filled by mke2fs from the directory: nothing is mounted as a loop. It is not the same bytes every time (keys,
# database cluster), so it is made once and cached by what it is made of.

full_packages="busybox-static postgresql nginx-light redis-server openjdk-17-jdk-headless gcc make libc6-dev
    openmpi-bin libopenmpi-dev openssh-client procps mpv ffmpeg sysbench stress-ng perl bzip2 xalan"
full_source=zlib
full_disk_bytes=6G

full_disk() {
    local out=$1 suite log="$cache/full.log"
    fetch_source "$full_source" "$out/files/usr/src"
    cp -r "$here/full/files" "$out/"
    tar -C "$out/files" --owner=0 --group=0 --mode=u=rwX,go=rX -cf "$out/files.tar" .
    suite=$(suite)
    say "installing packages of $suite (minutes)"
    # Hooks run beside the new root, as its root: they may fill it and read it, and download what they leave in it.
    mmdebstrap --verbose --variant=minbase --format=null --include="$(echo $full_packages | tr -s ' ' ,)" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt=force-unsafe-io \
        --aptopt='Acquire::Retries "3"' \
        `# The JVM's installation links its manual pages into a directory that is excluded.` \
        --essential-hook='mkdir -p "$1/usr/share/man/man1"' \
        --customize-hook="tar-in $out/files.tar /" \
        --customize-hook='chroot "$1" sh /usr/lib/firn/prepare' \
        --customize-hook="$here/full/make-disk \"\$1\" $full_disk_bytes" \
        --customize-hook="download /disk.qcow2 $out/disk.qcow2" \
        "$suite" - "$cache/apt/sources.list" > "$log" 2>&1 || {
        grep -v '^[IDN]: ' "$log" | tail -n 15 >&2
        die "mmdebstrap failed, see $log; as an ordinary user it needs the package uidmap"
    }
    resolve_packages $full_packages > "$out/packages"
    rm -rf "$out/files" "$out/files.tar"
}
