/* Counts its own starts, and survives being killed at any instant.
 *
 *   cc counter.c $(pkg-config --cflags --libs firnapp) -o counter && ./counter counter.log
 */
#include <firnapp.h>
#include <stdio.h>

struct state {
    uint64_t starts;
    uint64_t last[4];
};

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, firn_app_error());
    return 1;
}

int main(int argc, char **argv) {
    firn_app_options options = {.struct_size = sizeof options, .name = "counter", .file = argc > 1 ? argv[1] : "counter.log"};
    firn_app *session;
    if (firn_app_open(&options, &session) < 0) return fail("open");

    void *memory;
    if (firn_app_allocate(session, "state", sizeof(struct state), &memory) < 0) return fail("allocate");
    struct state *state = memory;
    if (firn_app_recover(session) < 0) return fail("recover");

    if (firn_app_begin(session) < 0) return fail("begin");
    state->last[state->starts % 4] = state->starts;
    state->starts += 1;
    if (firn_app_commit(session) < 0) return fail("commit");

    if (firn_app_begin(session) < 0) return fail("begin");
    state->starts = 0; /* a mistake */
    if (firn_app_abort(session) < 0) return fail("abort");

    printf("start %llu\n", (unsigned long long)state->starts);
    firn_app_close(session);
    return 0;
}
