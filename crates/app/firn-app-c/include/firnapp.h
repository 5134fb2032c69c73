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
    FIRN_APP_EBACKUP = -4, /* too few targets have a transaction in time: it is committed here, not acknowledged, and stored when they return */
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

/* A target that transactions are written to: a log in a file, or a backup process on another host. */
typedef struct {
    const char *file;        /* the log; NULL: a backup process */
    const char *remote;      /* HOST:PORT of a backup process; NULL: a log */
    const char *certificate; /* PEM files for the backup process; a key that others can read is refused */
    const char *key;
    const char *authority;
    uint64_t lag_max;        /* transactions that it may not have acknowledged yet when commit returns; 0: none */
    int fsync_ms;            /* of a log: 0: every commit; negative: never; else the minimum interval */
    int compress;            /* not 0: records are compressed */
} firn_app_target;

/* The options of a session. All zeros but struct_size, the name and a target is a good choice. */
typedef struct {
    size_t struct_size;      /* sizeof(firn_app_options): later versions have more members at the end */
    const char *name;
    const char *tracker;     /* "pt", "emul", "pt_assisted", "scan", "compare", "pt_host", "emul_host"; NULL: the fastest here */
    const char *file;        /* a target: the log; NULL: none */
    const char *remote;      /* another target: HOST:PORT of a backup process; NULL: none */
    const char *certificate; /* these members are for the two targets above, as in firn_app_target */
    const char *key;
    const char *authority;
    uint64_t lag_max;
    int fsync_ms;
    int compress;
    int discard;             /* not 0: the state that a backup has is discarded */
    const char *host_key;    /* for "pt_host" and "emul_host": the key of this name in the policy of Firn on the host, 64 hexadecimal digits */
    const firn_app_target *targets; /* more targets */
    size_t target_count;
    size_t target_size;      /* sizeof(firn_app_target), if there are any */
    const char *require;     /* how many targets must have stored a transaction when commit returns: "all", "any", or a number; NULL: all */
    uint64_t timeout_ms;     /* how long a call waits for targets that are away; 0: 10 s */
    int no_backup;           /* not 0: the session has no target, on purpose, and nothing is recoverable */
    int later_handler;       /* not 0: a handler of SIGSEGV that is installed later calls the one that it replaces */
} firn_app_options;

/* The condition of a target. */
enum {
    FIRN_APP_CONNECTED = 0,   /* it has each transaction, or gets it next */
    FIRN_APP_CATCHING_UP = 1, /* it has returned, and gets what it lacks */
    FIRN_APP_LOST = 2,        /* it cannot be reached or written; the library tries again */
    FIRN_APP_SUPERSEDED = 3   /* a later session of this name has it; final */
};

/* The status of a target. The strings are valid until the next call for the same session. */
typedef struct {
    const char *target;      /* the path or the address */
    int condition;
    int64_t since;           /* seconds since 1970: when this condition began */
    uint64_t acknowledged;   /* the last transaction that it has stored; 0: not known yet */
    uint64_t commits_behind; /* committed transactions that it lacks, and their bytes */
    uint64_t bytes_behind;
    uint64_t state_transfers; /* how often it was sent the whole state */
    const char *last_error;  /* also after it was overcome; NULL: there was none */
} firn_app_target_status;

typedef struct firn_app_standby firn_app_standby;

/* The options of a warm standby. */
typedef struct {
    size_t struct_size;      /* sizeof(firn_app_standby_options) */
    const char *listen;      /* HOST:PORT; port 0: any */
    const char *directory;   /* of the logs: NAME.log */
    const char *certificate; /* PEM files: this side, and the authority of the application's certificate */
    const char *key;
    const char *authority;
    const char *sessions;    /* a table of permissions, see firn-app-backup(1); NULL: the first certificate owns a session */
    int fsync_ms;
} firn_app_standby_options;

/* Opens a session into *session. */
int firn_app_open(const firn_app_options *options, firn_app **session);

/* Allocates an area of zeros, aligned to a page. Returns its number, and its address in *start. It exists until it is forgotten
 * or the session is closed. */
int firn_app_allocate(firn_app *session, const char *name, size_t length, void **start);

/* Makes existing memory an area, and returns its number. The memory must exist until it is forgotten or the session is closed,
 * must not be a stack, and no other code may protect or unmap its pages. Not with "emul", maybe not with "scan". */
int firn_app_register(firn_app *session, const char *name, void *start, size_t length);

/* Forgets an area, by its number: it is no part of later transactions, and the next committed one removes it from the backups.
 * Registered memory may be unmapped or freed then; allocated memory is unmapped by this call. Not inside of a transaction. */
int firn_app_forget_area(firn_app *session, int area);

/* Fills the areas with the last committed state of the backups. Returns its number; 0 if there is none. */
int64_t firn_app_recover(firn_app *session);

int firn_app_begin(firn_app *session);

/* Waits until the required targets have stored the transaction. Returns its number. */
int64_t firn_app_commit(firn_app *session);

/* Restores the last committed state of the areas. */
int firn_app_abort(firn_app *session);

/* Writes up to `count` changes of the last committed transaction, and returns how many there are. */
int64_t firn_app_changes(const firn_app *session, firn_app_change *changes, size_t count);

/* Waits until every target has all committed transactions, for timeout_ms at most. */
int firn_app_flush(firn_app *session);

/* Writes the status of up to `count` targets, in the order file, remote, targets, and returns how many there are.
 * `size` is sizeof(firn_app_target_status). */
int firn_app_status(firn_app *session, firn_app_target_status *targets, size_t size, size_t count);

/* The number of the last transaction that every backup has; 0 in a child of the process that opened the session. */
uint64_t firn_app_acknowledged(const firn_app *session);

/* The tracker with which the session was opened. */
const char *firn_app_tracker(const firn_app *session);

/* Ends a session: an open transaction is aborted, and backups get the transactions that they lack. NULL is allowed.
 * In a child of the process that opened the session, it releases what the child has, and nothing of the parent. */
void firn_app_close(firn_app *session);

/* Starts a backup process inside of this program, which receives the transactions of a session on another host. */
int firn_app_standby_start(const firn_app_standby_options *options, firn_app_standby **standby);

/* The address on which it listens. Valid until it ends. */
const char *firn_app_standby_address(const firn_app_standby *standby);

/* Shuts out the other host, fills the areas of a session of the same name with the last acknowledged state, and continues
 * the log. The session must have no target (no_backup). Returns the number of the last transaction; 0 if there was none.
 * The standby ends, also after an error. */
int64_t firn_app_standby_take_over(firn_app_standby *standby, firn_app *session);

/* Ends a standby without a takeover. NULL is allowed. */
void firn_app_standby_stop(firn_app_standby *standby);

/* The description of the last error of the calling thread. Valid until its next call of this library. */
const char *firn_app_error(void);

#ifdef __cplusplus
}
#endif
#endif
