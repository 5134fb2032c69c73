/* libfirnapp: critical data areas, transactions, backup and recovery. See firnapp(3).
 *
 * Every function gives 0 or a positive number, or a negative error (FIRN_APP_E...); firn_app_error() has the words.
 * Threads: any number may write areas between begin and commit; while a function of a session runs, none may, and no
 * other function of the same session runs.
 */
#ifndef FIRNAPP_H
#define FIRNAPP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct firn_app firn_app;

enum {
    FIRN_APP_EINVAL = -1,  /* an argument makes no sense */
    FIRN_APP_ESTATE = -2,  /* not now: a transaction is open, or none is */
    FIRN_APP_ETRACKER = -3, /* the tracker does not work here, or not on this memory */
    FIRN_APP_EBACKUP = -4, /* the backup failed; a transaction is committed here, and not acknowledged */
    FIRN_APP_ESYSTEM = -5, /* the kernel refused something */
    FIRN_APP_EINTERNAL = -6, /* a defect of the library: the session is not to be used any more */
    FIRN_APP_EFORKED = -7 /* the session belongs to the process that this one was forked from */
};

/* Bytes that a transaction changed. */
typedef struct {
    uint32_t area;
    size_t offset;
    size_t length;
} firn_app_change;

/* How to open a session. All zeros but the name is a good choice. */
typedef struct {
    const char *name;
    const char *tracker;     /* "pt", "emul", "pt_assisted", "scan", "compare", "pt_host", "emul_host"; NULL: the quickest here */
    const char *file;        /* the log; NULL: none */
    const char *remote;      /* HOST:PORT of a backup process; NULL: none */
    const char *certificate; /* PEM files for the remote backup */
    const char *key;
    const char *authority;
    uint64_t lag_max;        /* transactions that may not be acknowledged yet when commit returns; 0: none */
    int fsync_ms;            /* 0: every commit; negative: never; else at most so often */
    int compress;            /* not 0: records are compressed */
    int discard;             /* not 0: what a backup has is thrown away */
    const char *host_key;    /* with "pt_host" and "emul_host", Firn below this guest: the key of this name there, 64 hexadecimal digits */
} firn_app_options;

/* Opens a session into *session. */
int firn_app_open(const firn_app_options *options, firn_app **session);

/* A new area of zeros, aligned to a page. Gives its number; *start is where it is. It lives as long as the session. */
int firn_app_allocate(firn_app *session, const char *name, size_t length, void **start);

/* Makes memory that is there already an area, and gives its number. The memory must stay until the session is closed, must
 * not be a stack, and its pages must not be protected or unmapped by anybody else. Not with "emul", maybe not with "scan". */
int firn_app_register(firn_app *session, const char *name, void *start, size_t length);

/* Fills the areas with the last committed state of the backups. Gives its number; 0 if there is none. */
int64_t firn_app_recover(firn_app *session);

int firn_app_begin(firn_app *session);

/* Gives the number of the transaction. */
int64_t firn_app_commit(firn_app *session);

/* Brings the areas back to the last committed state. */
int firn_app_abort(firn_app *session);

/* Writes up to `count` changes of the last committed transaction, and gives how many there are. */
int64_t firn_app_changes(const firn_app *session, firn_app_change *changes, size_t count);

/* Waits until every backup has everything. */
int firn_app_flush(firn_app *session);

/* The number of the last transaction that every backup has; 0 in a child of the process that opened the session. */
uint64_t firn_app_acknowledged(const firn_app *session);

/* The tracker in use. */
const char *firn_app_tracker(const firn_app *session);

/* Ends a session: a transaction that is open is aborted, backups get what they have not. NULL is allowed.
 * In a child of the process that opened it, it releases what the child has, and nothing of the parent's. */
void firn_app_close(firn_app *session);

/* Words for the last error of the calling thread. Valid until its next call of this library. */
const char *firn_app_error(void);

#ifdef __cplusplus
}
#endif
#endif
