"""Counts its own starts, and survives being killed at any instant.

    python3 counter.py libfirnapp.so counter.log
"""
import ctypes
import sys


class Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)]
    _fields_ += [(name, ctypes.c_char_p) for name in
                ("name", "tracker", "file", "remote", "certificate", "key", "authority")]
    _fields_ += [("lag_max", ctypes.c_uint64), ("fsync_ms", ctypes.c_int),
                 ("compress", ctypes.c_int), ("discard", ctypes.c_int), ("host_key", ctypes.c_char_p)]
    _fields_ += [("targets", ctypes.c_void_p), ("target_count", ctypes.c_size_t), ("target_size", ctypes.c_size_t),
                 ("require", ctypes.c_char_p), ("timeout_ms", ctypes.c_uint64),
                 ("no_backup", ctypes.c_int), ("later_handler", ctypes.c_int)]

    def __init__(self, **options):
        super().__init__(struct_size=ctypes.sizeof(Options), **options)


class State(ctypes.Structure):
    _fields_ = [("starts", ctypes.c_uint64), ("last", ctypes.c_uint64 * 4)]


lib = ctypes.CDLL(sys.argv[1])
lib.firn_app_error.restype = ctypes.c_char_p
lib.firn_app_recover.restype = lib.firn_app_commit.restype = ctypes.c_int64


def check(result):
    if result < 0:
        raise OSError(lib.firn_app_error().decode())
    return result


session, memory = ctypes.c_void_p(), ctypes.c_void_p()
options = Options(name=b"counter", file=sys.argv[2].encode())
check(lib.firn_app_open(ctypes.byref(options), ctypes.byref(session)))
size = ctypes.c_size_t(ctypes.sizeof(State))
check(lib.firn_app_allocate(session, b"state", size, ctypes.byref(memory)))
state = State.from_address(memory.value)
check(lib.firn_app_recover(session))

check(lib.firn_app_begin(session))
state.last[state.starts % 4] = state.starts
state.starts += 1
check(lib.firn_app_commit(session))

print("start", state.starts)
lib.firn_app_close(session)
