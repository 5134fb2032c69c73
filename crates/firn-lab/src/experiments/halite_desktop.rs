//! `halite-desktop`: several programs that somebody works with at once, restored in the middle of it.
//!
//! Reproduces Figure 5 of Halite (section 8.2.1), with a mix of programs of the full guest in the place of Worldbench's
//! multi-tasking test. Three people's worth of processes run side by side on two vCPUs, each a fixed number of times:
//!
//! - *edit and compile*: changes a source file of a C library, has make and gcc build it, looks at the change with diff
//!   and grep;
//! - *browse*: fetches pages of the guest's own web server, takes the words out of them, counts and sorts these, and
//!   keeps a compressed copy; another page each time;
//! - *play*: mpv decodes the next second of a clip.
//!
//! What varies, what is held equal and what is measured is said in [`super::application`]. Programs and files are in the
//! guest's page cache by the time of the checkpoint, because each of the three has run before, on files that are not all
//! those it runs on afterwards.

use anyhow::Result;

use super::application::Application;
use crate::lab::Lab;
use crate::report::Report;

/// How often each of the three runs before the checkpoint, and after it.
#[derive(Clone, Copy, Debug)]
struct Scale {
    before: u32,
    after: u32,
}

const QUICK: Scale = Scale { before: 2, after: 4 };
const FULL: Scale = Scale { before: 2, after: 8 };

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let application = Application {
        name: "halite-desktop",
        memory_mib: 1024,
        services: "nginx",
        script: script(lab.extent.pick(QUICK, FULL)),
        figure: "Restore overhead of a desktop mix (Halite, Figure 5)",
        drawing: "halite-figure-5",
    };
    application.run(lab)
}

/// Each of the three counts its rounds; `middle` is said when all have come to the checkpoint.
fn script(scale: Scale) -> String {
    let Scale { before, after } = scale;
    let rounds = before + after;
    format!(
        r#"
        set -e
        cat /var/www/firn/page/?.html /var/www/firn/page/??.html > /dev/null
        cp -r /usr/src/zlib /tmp/zlib
        make -s -C /tmp/zlib -j2 adler32.o compress.o > /dev/null 2>&1
        mkdir /tmp/browser /tmp/edits
        compile() {{
            cd /tmp/zlib
            local round=$1
            set -- zutil inffast uncompr inftrees gzread gzlib trees crc32 compress gzwrite
            shift $((round % 10))
            cp $1.c /tmp/edits/$1.c
            echo "int firn_edit_$1;" >> $1.c
            make -s $1.o > /dev/null 2>&1
            diff $1.c /tmp/edits/$1.c | grep -q firn_edit
            grep -c static *.c > /tmp/edits/found
        }}
        browse() {{
            for page in 1 2 3; do
                page=$(($1 * 3 + page))
                busybox wget -q -O /tmp/browser/page http://127.0.0.1/page/$page.html
                sed -e 's/<[^>]*>//g' /tmp/browser/page | tr ' ' '\n' | sort | uniq -c | sort -rn > /tmp/browser/words
                gzip -c /tmp/browser/page > /tmp/browser/$page.gz
            done
        }}
        play() {{
            mpv --no-config --really-quiet --vo=null --ao=null --untimed --start=$1 --length=1 /var/lib/firn/clip.mkv
        }}
        for what in compile browse play; do
            (
                for round in $(seq 1 {rounds}); do
                    $what $round < /dev/null
                    echo $what $round
                done
            ) > /tmp/$what.log 2>&1 &
        done
        until [ $(grep -l ' {before}$' /tmp/compile.log /tmp/browse.log /tmp/play.log | wc -l) = 3 ]; do
            [ -n "$(jobs -r)" ]
            sleep 0.1
        done
        echo middle
        wait
        [ $(grep -l ' {rounds}$' /tmp/compile.log /tmp/browse.log /tmp/play.log | wc -l) = 3 ]
        echo done $(cut -d' ' -f1 /proc/uptime)
        "#
    )
}
