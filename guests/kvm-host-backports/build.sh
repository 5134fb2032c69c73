# The machine in which KVM works (../kvm-host) with the kernel of Debian's backports: one that can remember which pages a process
# wrote (Linux 6.7). QEMU is the stock one. Sourced by guests/build. Needs no root. Debian 12 only.

. "$here/kvm-host/build.sh"

build_cached() {
    local key
    prepare_apt
    release=$(stable_release)
    in_backports prepare_backports "$firn_sources"
    kvm_host_packages="linux-image-cloud-amd64/$release-backports ${kvm_host_packages#* }"
    # shellcheck disable=SC2086  # a list of words
    key=$(in_backports resolve_packages $kvm_host_packages |
        key_of "$here/build" "$here"/lib/*.sh "$here"/kvm-host/* "$here"/kvm-host-backports/*)
    publish "$key" in_backports_into
}

in_backports_into() { in_backports kvm_host_into "$1"; }
