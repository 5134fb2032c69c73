# The work of halite-desktop, in the guest. Each of the three people's processes counts its rounds: `middle` is said when
# all have done $before of $rounds, `done` and the guest's clock when all have done all.
set -e
cat /var/www/firn/page/?.html /var/www/firn/page/??.html > /dev/null
cp -r /usr/src/zlib /tmp/zlib
make -s -C /tmp/zlib -j2 adler32.o compress.o > /dev/null 2>&1
mkdir /tmp/browser /tmp/edits
compile() {
    cd /tmp/zlib
    local round=$1
    set -- zutil inffast uncompr inftrees gzread gzlib trees crc32 compress gzwrite
    shift $((round % 10))
    cp $1.c /tmp/edits/$1.c
    echo "int firn_edit_$1;" >> $1.c
    make -s $1.o > /dev/null 2>&1
    diff $1.c /tmp/edits/$1.c | grep -q firn_edit
    grep -c static *.c > /tmp/edits/found
}
browse() {
    for page in 1 2 3; do
        page=$(($1 * 3 + page))
        busybox wget -q -O /tmp/browser/page http://127.0.0.1/page/$page.html
        sed -e 's/<[^>]*>//g' /tmp/browser/page | tr ' ' '\n' | sort | uniq -c | sort -rn > /tmp/browser/words
        gzip -c /tmp/browser/page > /tmp/browser/$page.gz
    done
}
play() {
    mpv --no-config --really-quiet --vo=null --ao=null --untimed --start=$1 --length=1 /var/lib/firn/clip.mkv
}
for what in compile browse play; do
    (
        for round in $(seq 1 $rounds); do
            $what $round < /dev/null
            echo $what $round
        done
    ) > /tmp/$what.log 2>&1 &
done
until [ $(grep -l " $before\$" /tmp/compile.log /tmp/browse.log /tmp/play.log | wc -l) = 3 ]; do
    [ -n "$(jobs -r)" ]
    sleep 0.1
done
echo middle
wait
[ $(grep -l " $rounds\$" /tmp/compile.log /tmp/browse.log /tmp/play.log | wc -l) = 3 ]
echo done $(cut -d' ' -f1 /proc/uptime)
