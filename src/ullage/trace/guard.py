"""What traced code may not do: touch the network, write to the disk, start processes, and, inside a step, read files.

A trace runs a person's own code on tensors without contents, to learn what it allocates. Anything it would do to the world beside
that is refused before it happens, by Python's audit events (PEP 578), and where a library opens files in C++ or Rust, which raises none, at
the library's own door. Imports stay possible. It keeps an honest module from acting, it is no sandbox for a hostile one.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from ullage.errors import InvalidInput
from ullage.trace.patch import replaced

_WRITES = frozenset(
    {
        "os.chmod",
        "os.chown",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.utime",
        "shutil.rmtree",
        "shutil.move",
        "shutil.copyfile",
        "sqlite3.connect",
    }
)
_PROCESSES = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn"}
)
_NETWORK = frozenset(
    {"socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"}
)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CODE = (".py", ".pyc", ".so", ".pth", ".pyd", ".dll")

_where: list[str] = []
"""What is guarded now: "import", "factory" or "step"; empty: nothing."""
_installed = False


@contextmanager
def guarded(part: str) -> Iterator[None]:
    """Refuses the above while the body runs. part: "import", "factory" or "step"."""
    global _installed
    if not _installed:
        sys.addaudithook(_audit)  # cannot be taken back, so it asks _where
        _installed = True
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _where.append(part)
    try:
        with ExitStack() as stack:
            for holder, name in _doors():
                stack.enter_context(replaced(holder, name, _kept_shut(getattr(holder, name), name)))
            yield
    finally:
        _where.pop()
        sys.dont_write_bytecode = bytecode


def _doors() -> Iterator[tuple[Any, str]]:
    """Functions that open a path, their first or second argument, outside of Python: torch.save's and torch.jit.save's, safetensors'."""
    yield torch._C, "PyTorchFileWriter"
    yield torch.UntypedStorage, "from_file"
    yield RecursiveScriptModule, "save"
    if find_spec("safetensors") is not None:
        yield import_module("safetensors"), "serialize_file"
        if "safetensors.torch" in sys.modules:  # which has a name of its own for it
            yield sys.modules["safetensors.torch"], "serialize_file"


def _kept_shut(opens: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``opens``, refused a path while something is guarded (whoever imports it meanwhile keeps this one)."""

    def checked(*arguments: Any, **keywords: Any) -> Any:
        path = next((one for one in (*arguments[:2], *keywords.values()) if isinstance(one, str | os.PathLike)), None)
        if _where and path is not None:
            _refuse("writes to the disk", f"{name}({os.fspath(path)!r})")
        return opens(*arguments, **keywords)

    return checked


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _where:
        return
    if event == "open":
        _opened(*arguments[:3])
    elif event in _WRITES:
        _refuse("changes files", f"{event}({arguments[0]!r})")
    elif event in _PROCESSES:
        _refuse("starts a process", f"{event}({arguments[0]!r})")
    elif event in _NETWORK:
        _refuse("uses the network", event)


def _opened(path: object, mode: object, flags: object) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return  # a file descriptor that is open already
    name = os.fsdecode(path)
    if name.startswith(("/dev/null", "/dev/urandom", "/proc/", "/sys/")):
        return
    writes = isinstance(mode, str) and set(mode) & set("wax+")
    if writes or (not isinstance(mode, str) and isinstance(flags, int) and flags & _WRITE_FLAGS):
        _refuse("writes to the disk", f"open({name!r})")
    if _where[-1] == "step" and not name.endswith(_CODE) and not is_library(name):
        _refuse("reads a file", f"open({name!r})")


def _refuse(what: str, how: str) -> None:
    raise InvalidInput(
        f"{what}: {how[:120]}",
        key=_where[-1],
        allowed="code that only makes tensors",
        remedy="a trace runs without contents; leave this out of what is traced",
        place=place_of(sys._getframe(2)),
    )


# -- where a person's own code is

_LIBRARIES = tuple(
    os.path.realpath(path)
    for path in {
        *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    }
)


def is_library(path: str) -> bool:
    """Python's own, an installed package's, or ours."""
    return path.startswith("<") or os.path.realpath(path).startswith(_LIBRARIES)


def place_of(where: FrameType | TracebackType | None) -> str | None:
    """``file, line n`` of the innermost line of a person's own code in a stack or a traceback."""
    found = None
    if isinstance(where, TracebackType):
        step: TracebackType | None = where
        while step is not None:
            if not is_library(step.tb_frame.f_code.co_filename):
                found = (step.tb_frame.f_code.co_filename, step.tb_lineno)
            step = step.tb_next
    else:
        frame = where
        while frame is not None and found is None:
            if not is_library(frame.f_code.co_filename):
                found = (frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
    return f"{os.path.relpath(found[0])}, line {found[1]}" if found else None
