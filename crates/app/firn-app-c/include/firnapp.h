/* libfirnapp: critical data areas, transactions, backup and recovery. See firnapp(3).
 *
 * Every function returns 0 or a positive number, or a negative error (FIRN_APP_E...); firn_app_error() describes it.
 * Threads: any number may write areas between begin and commit. While a function of a session runs, no thread may write
 * them, and no other function of the same session may run.
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
    FIRN_APP_EINVAL = -1,  /* an argument is invalid */
    FIRN_APP_ESTATE = -2,  /* the session is in another state: a transaction is open, or none is */
    FIRN_APP_ETRACKER = -3, /* the tracker does not work here, or not on this memory */
    FIRN_APP_EBACKUP = -4, /* the backup failed; a transaction is committed here, and not acknowledged */
    FIRN_APP_ESYSTEM = -5, /* a system call failed */
    FIRN_APP_EINTERNAL = -6, /* a defect of the library: do not use the session any more */
    FIRN_APP_EFORKED = -7 /* the session belongs to the process that this one was forked from */
};

/* A range of bytes that a transaction changed. */
typedef struct {
    uint32_t area;
    size_t offset;
    size_t length;
} firn_app_change;

/* The options of a session. All zeros but the name is a good choice. */
typedef struct {
    const char *name;
    const char *tracker;     /* "pt", "emul", "pt_assisted", "scan", "compare", "pt_host", "emul_host"; NULL: the fastest here */
    const char *file;        /* the log; NULL: none */
    const char *remote;      /* HOST:PORT of a backup process; NULL: none */
    const char *certificate; /* PEM files for the remote backup */
    const char *key;
    const char *authority;
    uint64_t lag_max;        /* transactions that may not be acknowledged yet when commit returns; 0: none */
    int fsync_ms;            /* 0: every commit; negative: never; else the minimum interval */
    int compress;            /* not 0: records are compressed */
    int discard;             /* not 0: the state that a backup has is discarded */
    const char *host_key;    /* for "pt_host" and "emul_host": the key of this name in the policy of Firn on the host, 64 hexadecimal digits */
} firn_app_options;

/* Opens a session into *session. */
int firn_app_open(const firn_app_options *options, firn_app **session);

/* Allocates an area of zeros, aligned to a page. Returns its number, and its address in *start. It exists as long as the session. */
int firn_app_allocate(firn_app *session, const char *name, size_t length, void **start);

/* Makes existing memory an area, and returns its number. The memory must exist until the session is closed, must not be a
 * stack, and no other code may protect or unmap its pages. Not with "emul", maybe not with "scan". */
int firn_app_register(firn_app *session, const char *name, void *start, size_t length);

/* Fills the areas with the last committed state of the backups. Returns its number; 0 if there is none. */
int64_t firn_app_recover(firn_app *session);

int firn_app_begin(firn_app *session);

/* Returns the number of the transaction. */
int64_t firn_app_commit(firn_app *session);

/* Restores the last committed state of the areas. */
int firn_app_abort(firn_app *session);

/* Writes up to `count` changes of the last committed transaction, and returns how many there are. */
int64_t firn_app_changes(const firn_app *session, firn_app_change *changes, size_t count);

/* Waits until every backup has all committed transactions. */
int firn_app_flush(firn_app *session);

/* The number of the last transaction that every backup has; 0 in a child of the process that opened the session. */
uint64_t firn_app_acknowledged(const firn_app *session);

/* The tracker in use. */
const char *firn_app_tracker(const firn_app *session);

/* Ends a session: an open transaction is aborted, and backups get the transactions that they lack. NULL is allowed.
 * In a child of the process that opened the session, it releases what the child has, and nothing of the parent. */
void firn_app_close(firn_app *session);

/* The description of the last error of the calling thread. Valid until its next call of this library. */
const char *firn_app_error(void);

#ifdef __cplusplus
}
#endif
#endif
