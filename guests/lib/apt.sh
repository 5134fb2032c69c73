# A private apt: the machine's own sources and keys, but its own lists, status and archive, so that neither root nor
# the packages installed on this machine matter. Sourced by guests/build; expects $cache and $refresh.

# apt-get/apt-cache with private state. An empty status file makes every dependency count.
private_apt() {
    local command=$1; shift
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial"
    : >> "$cache/apt/status"
    "$command" -o Dir::State::Lists="$cache/apt/lists" -o Dir::State::status="$cache/apt/status" \
        -o Dir::Cache="$cache/apt" -o Dir::Cache::archives="$cache/apt/archives" \
        -o Dir::State::extended_states="$cache/apt/extended_states" \
        -o APT::Sandbox::User= -o Debug::NoLocking=1 -o APT::Install-Recommends=0 \
        -o Dir::Etc::sourcelist="${firn_sources:-/etc/apt/sources.list}" \
        -o Dir::Etc::sourceparts="${firn_source_parts-/etc/apt/sources.list.d}" \
        -o APT::Get::List-Cleanup=0 -o Acquire::Retries=3 "$@"
}

# Brings the package lists, and keeps of the machine's sources those whose releases are signed as Debian's: a guest
# must not change because somebody added another repository.
prepare_apt() {
    exec 8>"$cache/apt.lock"
    flock 8
    if [ "$refresh" = yes ] || [ ! -s "$cache/apt/sources.list" ]; then
        say "reading package lists"
        private_apt apt-get update -qq >&2 || die "apt cannot read the package lists of the configured mirror"
        private_apt apt-get indextargets \
            --format 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(REPO_URI) $(RELEASE) $(COMPONENT)' \
            "Created-By: Packages" "Origin: Debian" "Architecture: amd64" | sort -u > "$cache/apt/sources.new"
        [ -s "$cache/apt/sources.new" ] || die "apt on this machine has no Debian source configured (see sources.list(5))"
        mv "$cache/apt/sources.new" "$cache/apt/sources.list"
        rm -f "$cache"/apt/resolved-*
    fi
    flock -u 8
    firn_sources="$cache/apt/sources.list"
    firn_source_parts="/dev/null"
}

# What installing these packages on an empty system would bring, one "file-name hash" per line. Remembered until the
# package lists change.
resolve_packages() {
    local known
    known="$cache/apt/resolved-$(printf '%s\n' "$@" | sha256sum | cut -c1-16)"
    if [ ! -s "$known" ]; then
        mkdir -p "$cache/apt/none/partial"
        # An archive that is there already would be left out of the list: look from an empty one.
        private_apt apt-get install -qq --print-uris -o Acquire::ForceHash=SHA256 \
            -o Dir::Cache::archives="$cache/apt/none" "$@" | awk '{ print $2, $4 }' | sort > "$known.new"
        [ -s "$known.new" ] || die "apt cannot resolve: $*"
        mv "$known.new" "$known"
    fi
    cat "$known"
}

# Downloads these packages with all they depend on and unpacks them under a directory.
unpack_packages() {
    local root=$1; shift
    private_apt apt-get install -qq --download-only -y "$@" >&2 \
        || die "apt cannot download the packages; if the mirror has moved on, run again with --refresh"
    local deb _hash
    mkdir -p "$root"
    while read -r deb _hash; do
        dpkg-deb --extract "$cache/apt/archives/$deb" "$root"
    done < <(resolve_packages "$@")
}

# The suite of the configured mirror, without its updates.
suite() {
    awk '{ print $4 }' "$cache/apt/sources.list" | awk '{ print length, $0 }' | sort -n | awk 'NR == 1 { print $2 }'
}

# The upstream source of a Debian package, verified by apt, unpacked under a directory as NAME.
#   fetch_source NAME DIRECTORY
fetch_source() {
    local list="$cache/apt/sources-of-source.list" work
    work=$(mktemp -d "$cache/.source-XXXXXX")
    # The release's own sources: mirrors of security updates do not all carry them.
    awk -v suite="$(suite)" '$4 == suite { sub("^deb ", "deb-src "); print }' "$cache/apt/sources.list" > "$list"
    (
        firn_sources=$list
        private_apt apt-get update -qq >&2
        cd "$work"
        private_apt apt-get source -qq --download-only "$1" >&2
    ) || die "apt cannot download the source of $1"
    mkdir -p "$2/$1"
    tar -C "$2/$1" --strip-components=1 -xf "$(find "$work" -name "*.orig.tar.*" ! -name '*.asc' | head -n 1)"
    rm -rf "$work"
}

# The release this machine's apt is configured for, which must be the one whose backports are known.
stable_release() {
    local release
    release=$(awk '$4 ~ /^[a-z]+$/ { print $4; exit }' "$firn_sources")
    [ "$release" = bookworm ] || die "$guest takes from Debian 12's backports; this machine is configured for ${release:-no release}"
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
    exec 8> "$cache.lock"
    flock 8
    read_backports "$1"
    flock -u 8
}

read_backports() {
    [ "$refresh" = yes ] || [ ! -s "$firn_sources" ] || return 0
    say "reading package lists of $release-backports"
    mkdir -p "$cache/apt"
    { cat "$1"; sed -n "s/ $release / $release-backports /p" "$1"; } > "$firn_sources"
    rm -f "$cache"/apt/resolved-*
    private_apt apt-get update -qq >&2 \
        || { rm -f "$firn_sources"; die "the configured mirror has no $release-backports that apt can read"; }
}
