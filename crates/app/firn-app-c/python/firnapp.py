"""Critical data areas, transactions, backup and recovery: libfirnapp for Python. See firnapp(3).

    with firnapp.Session("ledger", file="ledger.log") as session:
        accounts = session.allocate("accounts", 4096)
        session.recover()
        with session.transaction():
            accounts[7] += 1

The library is found as libfirnapp.so.1, or by the variable FIRNAPP_LIBRARY.
"""
import contextlib
import ctypes
import os
import weakref

__all__ = ["Change", "Error", "Session", "Target", "TargetStatus"]

CONDITIONS = ("connected", "catching up", "lost", "superseded")


class _Target(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("file", "remote", "certificate", "key", "authority")]
    _fields_ += [("lag_max", ctypes.c_uint64), ("fsync_ms", ctypes.c_int), ("compress", ctypes.c_int)]


class _Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("tracker", ctypes.c_char_p)]
    _fields_ += _Target._fields_
    _fields_ += [("discard", ctypes.c_int), ("host_key", ctypes.c_char_p), ("targets", ctypes.POINTER(_Target)),
                 ("target_count", ctypes.c_size_t), ("target_size", ctypes.c_size_t), ("require", ctypes.c_char_p),
                 ("timeout_ms", ctypes.c_uint64), ("no_backup", ctypes.c_int), ("later_handler", ctypes.c_int)]


class Change(ctypes.Structure):
    """A range of bytes that a transaction changed: area (its number), offset, length."""
    _fields_ = [("area", ctypes.c_uint32), ("offset", ctypes.c_size_t), ("length", ctypes.c_size_t)]


class _Status(ctypes.Structure):
    _fields_ = [("target", ctypes.c_char_p), ("condition", ctypes.c_int), ("since", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_uint64) for name in ("acknowledged", "commits_behind", "bytes_behind", "state_transfers")]
    _fields_ += [("last_error", ctypes.c_char_p)]


class Error(OSError):
    """What the library reports; errno is the number of firnapp.h (FIRN_APP_E...)."""


class TargetStatus:
    """The status of a target. condition is one of CONDITIONS; last_error is None if there was none."""

    def __init__(self, status):
        self.target, self.condition = status.target.decode(), CONDITIONS[status.condition]
        self.last_error = status.last_error and status.last_error.decode()
        for name in ("since", "acknowledged", "commits_behind", "bytes_behind", "state_transfers"):
            setattr(self, name, getattr(status, name))

    def __repr__(self):
        return f"<{self.target}: {self.condition}, transaction {self.acknowledged}>"


def _encode(value):
    return os.fsencode(value) if isinstance(value, (str, os.PathLike)) else value


def Target(**members):
    """One of several targets: the members of firn_app_target (file, or remote with certificate, key, authority; lag_max,
    fsync_ms, compress)."""
    return _Target(**{name: _encode(value) for name, value in members.items()})


_SIGNATURES = {
    "open": (ctypes.c_int, [ctypes.POINTER(_Options), ctypes.POINTER(ctypes.c_void_p)]),
    "allocate": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]),
    "forget_area": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
    "recover": (ctypes.c_int64, [ctypes.c_void_p]),
    "begin": (ctypes.c_int, [ctypes.c_void_p]),
    "commit": (ctypes.c_int64, [ctypes.c_void_p]),
    "abort": (ctypes.c_int, [ctypes.c_void_p]),
    "changes": (ctypes.c_int64, [ctypes.c_void_p, ctypes.POINTER(Change), ctypes.c_size_t]),
    "flush": (ctypes.c_int, [ctypes.c_void_p]),
    "status": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(_Status), ctypes.c_size_t, ctypes.c_size_t]),
    "acknowledged": (ctypes.c_uint64, [ctypes.c_void_p]),
    "tracker": (ctypes.c_char_p, [ctypes.c_void_p]),
    "close": (None, [ctypes.c_void_p]),
    "error": (ctypes.c_char_p, []),
}


def _load_library():
    library = ctypes.CDLL(os.environ.get("FIRNAPP_LIBRARY", "libfirnapp.so.1"))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, "firn_app_" + name)
        function.restype, function.argtypes = result, arguments
    return library


class Session:
    """Critical data areas and the transactions on them.

    Options are the members of firn_app_options: file, remote, certificate, key, authority, lag_max, fsync_ms, compress,
    tracker, discard, require, timeout_ms, no_backup, later_handler, host_key; and targets, a list of Target().
    """

    def __init__(self, name, targets=(), **options):
        self._library, self._session, self._areas = _load_library(), ctypes.c_void_p(), {}
        self._is_in_transaction = False
        array = (_Target * len(targets))(*targets)
        given = _Options(struct_size=ctypes.sizeof(_Options), name=_encode(name), target_count=len(targets),
                         target_size=ctypes.sizeof(_Target), targets=array if targets else None,
                         **{key: _encode(value) for key, value in options.items()})
        self._check(self._library.firn_app_open(ctypes.byref(given), ctypes.byref(self._session)))

    def _check(self, result):
        if result < 0:
            raise Error(result, self._library.firn_app_error().decode())
        return result

    def _handle(self):
        if not self._session:
            raise ValueError("the session is closed")
        return self._session

    def allocate(self, name, size):
        """Allocates an area of zeros, and returns a memoryview of its bytes, which is released when the area is forgotten or
        the session is closed."""
        start = ctypes.c_void_p()
        arguments = (self._handle(), _encode(name), size, ctypes.byref(start))
        number = self._check(self._library.firn_app_allocate(*arguments))
        memory = type("AreaMemory", (ctypes.c_ubyte * size,), {}).from_address(start.value)
        view = memoryview(memory).cast("B")
        # The memory object exists for as long as any view of it: that is how those are found.
        self._areas[number] = view, weakref.ref(memory)
        return view

    def _release(self, number):
        view, memory = self._areas[number]
        view.release()
        if memory() is not None:
            raise BufferError(f"a slice of the view of area {number} is still used: delete it, and call this again")

    def number(self, view):
        """The number of the area with this memoryview, as in changes()."""
        return next(number for number, (known, _) in self._areas.items() if known is view)

    def forget(self, view):
        """Forgets an area. Its memory is unmapped, so nothing else may use the view (a slice, an array): that is a BufferError."""
        number = self.number(view)
        if self._is_in_transaction:
            raise ValueError("a transaction is open")
        handle = self._handle()
        self._release(number)
        del self._areas[number]
        self._check(self._library.firn_app_forget_area(handle, number))

    def recover(self):
        """Fills the areas with the last committed state. Returns its number; 0 if there is none."""
        return self._check(self._library.firn_app_recover(self._handle()))

    @contextlib.contextmanager
    def transaction(self):
        """Commits at the end of the block; aborts if the block raises an exception, which is raised again."""
        self._check(self._library.firn_app_begin(self._handle()))
        self._is_in_transaction = True
        try:
            yield self
        except BaseException:
            self._check(self._library.firn_app_abort(self._handle()))
            self._is_in_transaction = False
            raise
        self._is_in_transaction = False
        self._check(self._library.firn_app_commit(self._handle()))

    def changes(self):
        """The changes of the last committed transaction."""
        count = self._check(self._library.firn_app_changes(self._handle(), None, 0))
        changes = (Change * count)()
        self._check(self._library.firn_app_changes(self._handle(), changes, count))
        return list(changes)

    def flush(self):
        """Waits until every target has all committed transactions."""
        self._check(self._library.firn_app_flush(self._handle()))

    def status(self):
        """The status of each target."""
        size = ctypes.sizeof(_Status)
        count = self._check(self._library.firn_app_status(self._handle(), None, size, 0))
        found = (_Status * count)()
        self._check(self._library.firn_app_status(self._handle(), found, size, count))
        return [TargetStatus(status) for status in found]

    @property
    def acknowledged(self):
        """The number of the last transaction that every target has."""
        return self._library.firn_app_acknowledged(self._handle())

    @property
    def tracker(self):
        """The tracker with which the session was opened."""
        return self._library.firn_app_tracker(self._handle()).decode()

    def close(self):
        """Ends the session. A BufferError if a view of an area is still used, by a slice or an array."""
        for number in sorted(self._areas, reverse=True):
            self._release(number)
            del self._areas[number]
        if self._session:
            self._library.firn_app_close(self._session)
            self._session = ctypes.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
