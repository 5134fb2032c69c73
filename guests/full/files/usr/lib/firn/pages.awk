# Writes /var/www/firn/page/N.html for N below `pages`: 1 to 64 KiB of words drawn from a generator.
function next_number() { state = (state * 1103515245 + 12345) % 2147483648; return int(state / 65536) }
BEGIN {
    count = split("snow ice melt grain layer wind ridge glacier water stone light cold winter pressure depth year", words, " ")
    for (page = 0; page < pages; page++) {
        state = page + 1
        next_number()
        file = "/var/www/firn/page/" page ".html"
        size = 1024 * (1 + next_number() % 64)
        printf "<!doctype html><title>Page %d</title><p>\n", page > file
        for (length_now = 0; length_now < size; length_now += length(line) + 1) {
            line = words[1 + next_number() % count] next_number()
            for (word = 0; word < 9; word++) line = line " " words[1 + next_number() % count]
            print line > file
        }
        print "</p>" > file
        close(file)
    }
}
