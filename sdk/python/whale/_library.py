"""Finds libwhale.so, declares its functions, and turns its statuses into exceptions."""

from __future__ import annotations

import _thread
import ctypes
import functools
import itertools
import operator
import os
import pathlib
import re
import signal
import threading
import weakref
from ctypes import byref, c_void_p

from . import _abi


class WhaleError(Exception):
    """An error from the engine.

    Attributes: ``code`` (name of the status code), ``op``, ``scope`` (empty where they do not apply), ``rank``,
    ``device`` (-1 where they do not apply), ``damage`` ("call", "step", "session" or "peer_lost": how far it goes).
    """

    def __init__(self, message: str, code: str = "UNKNOWN", op: str = "", scope: str = "", rank: int = -1,
                 device: int = -1, damage: str = "call"):
        super().__init__(message)
        self.code, self.op, self.scope, self.rank, self.device, self.damage = code, op, scope, rank, device, damage


class InvalidArgument(WhaleError, ValueError):
    """A wrong shape, dtype, name, option or file content."""


class OutOfRange(WhaleError, ValueError):
    """A number that the run computed: a loss that is not finite, an index outside of its table. The message says whether the step was
    applied. (A number that the caller gave is ``InvalidArgument``.)"""


class NotFound(WhaleError, LookupError):
    """A name or a file that does not exist."""


class AlreadyExists(WhaleError, ValueError):
    """A name that is taken."""


class PermissionDenied(WhaleError, PermissionError):
    """A file that may not be read or written."""


class ResourceExhausted(WhaleError, MemoryError):
    """Memory, threads, the disk, or a limit of ``configure``; the message says which, and what to make smaller."""


class FailedPrecondition(WhaleError, RuntimeError):
    """Not in this state: a closed job, a sealed graph, a graph without ``minimize``."""


class Aborted(WhaleError, RuntimeError):
    """Somebody else was doing the same, such as saving to this directory; try again."""


class Unimplemented(WhaleError, NotImplementedError):
    """Legal, and not in this version."""


class Internal(WhaleError, RuntimeError):
    """A bug in libwhale: please report it, with the message."""


class DataLoss(WhaleError):
    """A file that is damaged or was cut off."""


class Cancelled(WhaleError):
    """The run was cancelled; the session is as before it."""


class DeadlineExceeded(WhaleError, TimeoutError):
    """It took longer than its timeout; everything is as before."""


class Unavailable(WhaleError, RuntimeError):
    """A device or a library that cannot be opened; the message says what to install."""


class Unauthenticated(WhaleError, PermissionError):
    """The token of a job is another one."""


# Status codes: each its class.
_KINDS = {"CANCELLED": Cancelled, "UNKNOWN": WhaleError, "INVALID_ARGUMENT": InvalidArgument, "DEADLINE_EXCEEDED": DeadlineExceeded,
          "NOT_FOUND": NotFound, "ALREADY_EXISTS": AlreadyExists, "PERMISSION_DENIED": PermissionDenied,
          "RESOURCE_EXHAUSTED": ResourceExhausted, "FAILED_PRECONDITION": FailedPrecondition, "ABORTED": Aborted, "OUT_OF_RANGE": OutOfRange,
          "UNIMPLEMENTED": Unimplemented, "INTERNAL": Internal, "UNAVAILABLE": Unavailable, "DATA_LOSS": DataLoss,
          "UNAUTHENTICATED": Unauthenticated}
_CODES = {getattr(_abi, f"WHALE_{name}"): name for name in _KINDS}
_DAMAGE = {0: "call", 1: "step", 2: "session", 3: "peer_lost"}


def text_of(value: _abi.whale_str) -> str:
    return value.data[:value.size].decode("utf-8", "replace") if value.data else ""


def _candidates() -> list[pathlib.Path]:
    package = pathlib.Path(__file__).resolve().parent
    places = []
    if "WHALE_LIBRARY" in os.environ:
        places.append(pathlib.Path(os.environ["WHALE_LIBRARY"]))
    places += sorted((package.parent / ".libwhale.mesonpy.libs").glob("libwhale.so*"))
    places += sorted(package.glob("libwhale.so*"))
    places += [package.parents[2] / "build" / "capi" / "libwhale.so"]
    return places


def _load() -> ctypes.CDLL:
    tried = []
    for place in [*_candidates(), "libwhale.so.0.2"]:
        if isinstance(place, pathlib.Path) and not place.exists():
            tried.append(str(place))
            continue
        try:
            library = _abi.declare(ctypes.CDLL(str(place)))
            if refusal := library.whale_abi_check(_abi.WHALE_VERSION_NUMBER):
                message = text_of(library.whale_status_message(refusal))
                library.whale_status_release(refusal)
                tried.append(f"{place} ({message})")
                continue
            return library
        except OSError as error:
            tried.append(f"{place} ({error})")
        except AttributeError as error:
            tried.append(f"{place} (of another version: {error})")
    raise ImportError("libwhale.so was not found; set WHALE_LIBRARY to its path. Tried: " + ", ".join(tried))


lib = _load()


def encoded(text: str) -> bytes:
    """In UTF-8; the bytes of a file's name that is none stay as they are (os.fsdecode)."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"expected text, found {text!r}, whose character {error.start} is half of a surrogate pair and stands for nothing",
                              "INVALID_ARGUMENT") from None


def string(text: str | None) -> _abi.whale_str:
    """A whale_str; whoever stores a copy of it keeps this one, which keeps the bytes alive."""
    data = encoded(text or "")
    result = _abi.whale_str(data, len(data))
    result._keep = data
    return result


def _in_words_of_python(message: str) -> str:
    """What whale.h calls a field of its options is an argument here; the engine's are those of ``configure``."""
    message = re.sub(r"argument `(?:options\.)?(\w+)`", r"argument '\1'", message)
    message = re.sub(r"make the engine with option (\w+)", r"call whale.configure(\1=...)", message)
    message = re.sub(r"make the engine with a larger (\w+)", r"call whale.configure with a larger \1", message)
    return re.sub(r"engine option (\w+)", r"whale.configure(\1=...)", message)


def check(status: int | None) -> None:
    """Raises the exception of a status, and frees it."""
    if not status:
        return
    try:
        code = _CODES.get(lib.whale_status_code(status), "UNKNOWN")
        op, scope = text_of(lib.whale_status_op(status)), text_of(lib.whale_status_scope(status))
        message = _in_words_of_python(text_of(lib.whale_status_message(status)))
        error = _KINDS[code](message, code, op, scope, lib.whale_status_rank(status), lib.whale_status_device(status),
                             _DAMAGE.get(lib.whale_status_damage(status), "call"))
    finally:
        lib.whale_status_release(status)
    raise error


def _take(kind: type, release, function, arguments: tuple) -> bytes:
    out = kind()
    check(function(*arguments, byref(out)))
    try:
        # Not out.data: that is a copy in an object of its own, which may be gone before it is read.
        address = c_void_p.from_buffer(out, kind.data.offset).value
        return ctypes.string_at(address, out.size) if out.size else b""
    finally:
        release(byref(out))


def take_bytes(function, *arguments) -> bytes:
    """Calls a function whose last parameter is `whale_bytes *out`."""
    return _take(_abi.whale_bytes, lib.whale_bytes_release, function, arguments)


def take_text(function, *arguments) -> str:
    """Calls a function whose last parameter is `whale_text *out`."""
    return _take(_abi.whale_text, lib.whale_text_release, function, arguments).decode()


_calls = operator.methodcaller("__call__")
_numbers = itertools.count()
_finalizers: dict[int, weakref.ref] = {}  # of the handles that are alive


class Handle:
    """An opaque handle, released once with the function named: by close() or when it is collected.

    It is collected without running a line of Python. Python sees Ctrl-C between two lines, and inside __del__ or a callback in Python
    the KeyboardInterrupt would be printed as ignored, and lost."""

    gone = "this job is closed; start another one with plan.start()"

    def __init__(self, pointer: int, release: str, first: tuple = ()):  # first: called before; C functions that return nothing
        self._pointer: int | None = pointer
        number = next(_numbers)
        # next() runs all calls, in C; when it is called again there are none left.
        forget = functools.partial(_finalizers.pop, number, None)
        self._release = filter(_calls, iter((*first, functools.partial(getattr(lib, release), pointer), forget)))
        _finalizers[number] = weakref.ref(self, functools.partial(next, self._release))

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise FailedPrecondition(self.gone, "FAILED_PRECONDITION")
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def __reduce__(self):
        raise TypeError("a job runs in this process and can be neither pickled nor copied; save a checkpoint of it with job.save(directory), and "
                        "pickle its plan")

    def close(self) -> None:
        self._pointer = None
        next(self._release, None)


def make(release: str, function, *arguments, first: tuple = ()) -> Handle:
    """Calls a function whose last parameter is a handle out-parameter."""
    out = c_void_p()
    check(function(*arguments, byref(out)))
    return Handle(out.value, release, first)


def interruptible(call, cancel: int):
    """What call() returns or raises. Ctrl-C triggers the cancel token, which the call looks at; when it has ended KeyboardInterrupt is
    raised. The call runs on a thread of its own, because Python sees a signal only between two calls into C. Off the main thread, which
    alone gets signals, and under a signal handler of the program's own it is just the call. What a handler of another signal raises
    triggers the token too, and is raised when the call has ended: it looks at what the caller would free."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return call()
    result, failure, pressed, ended = [], [], [], []
    owner: dict[int, str] = {}  # whoever is first: a worker that begins when its caller has gone calls nothing
    done = _thread.allocate_lock()
    done.acquire()

    def work(name: str) -> None:
        if owner.setdefault(0, name) != name:
            return
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)
        ended.append(True)
        done.release()

    def press(*_) -> None:  # raises nothing: whoever waits below would leave the call running
        pressed.append(True)
        lib.whale_cancel_trigger(cancel)

    raised, step = None, 0
    try:
        while True:
            try:  # a handler may raise at any line
                if raised is None and step == 0:
                    step = 1
                    signal.signal(signal.SIGINT, press)
                if raised is None and step == 1:
                    step = 2
                    try:
                        _thread.start_new_thread(work, ("worker",))
                    except RuntimeError as error:  # the system has no thread left: here then, where Ctrl-C is seen at the end
                        if "thread" not in str(error):
                            raise
                        work("here")
                if raised is None:
                    while not done.acquire(timeout=0.1):  # the system may give the signal to another thread, which does not wake this one
                        pass
                elif not ended and owner.setdefault(0, "gone") != "gone":
                    lib.whale_cancel_trigger(cancel)
                    done.acquire(timeout=0.01)
                    continue
                signal.signal(signal.SIGINT, signal.default_int_handler)
                break
            except BaseException as error:
                raised = raised or error
    finally:
        if signal.getsignal(signal.SIGINT) is press:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if raised is not None:
        raise raised
    if pressed:
        raise KeyboardInterrupt
    if failure:
        raise failure[0]
    return result[0]


_engine: Handle | None = None


def engine() -> int:
    """The engine of this process, made on first use."""
    global _engine
    if _engine is None:
        configure()
    return _engine.pointer


def configure(*, init_dir: str | os.PathLike = "", max_file_bytes: int = 0, max_ops: int = 0, max_tensors: int = 0,
              max_elements: int = 0, max_devices: int = 0, max_plan_bytes: int = 0) -> None:
    """What graphs and plans that are loaded from now on may ask for; what is beyond is refused, by an error that names the option.

    init_dir: folder that initial values may be read from, besides the default, the folder of the file that was loaded (``"/"``:
    any). max_file_bytes: of a graph or plan file. max_ops, max_tensors, max_elements (of all tensors together): of a graph.
    max_devices: of a plan. max_plan_bytes: estimated memory of making a plan. 0: whale.h's default."""
    from . import arguments  # it needs this module's errors
    global _engine
    options = _abi.whale_engine_options()
    options.struct_size = ctypes.sizeof(options)
    options.init_dir = string(arguments.path("init_dir", init_dir))
    for name, value in dict(max_file_bytes=max_file_bytes, max_ops=max_ops, max_tensors=max_tensors, max_elements=max_elements,
                            max_devices=max_devices, max_plan_bytes=max_plan_bytes).items():
        setattr(options, name, arguments.integer(name, value, 0))
    _engine = make("whale_engine_release", lib.whale_engine_create, byref(options))
