# The work of halite-pgbench, in the guest: reads the database into memory, then has clients ask it. They have just begun
# anew at the checkpoint, so that how fast they were until then does not change how much is left.
set -e
in=/usr/lib/firn/in-postgres
until $in pg_isready -q -h /run/postgresql; do sleep 0.1; done
cat /var/lib/firn/postgres/data/base/*/* > /dev/null
bench() { $in pgbench -h /run/postgresql -S -n -c 2 -j 2 -t $1 bench; }
bench $before
bench $after &
sleep 1
echo middle
wait $!
echo done $(cut -d' ' -f1 /proc/uptime)
