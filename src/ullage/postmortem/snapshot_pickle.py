"""A pickle of plain containers, read without Python's unpickler: nothing in it can be called, imported or built.

A pickle is a program. This machine knows the opcodes that make dict, list, tuple, str, bytes, int, float, bool and None, and
no other: it holds no way to run anything. Limits guard what plain containers can still do: a small file that says to reserve
much memory (checked against the bytes that are there), containers without number, keys that are slow or deep to hash.
What a reference repeats (the memo) is one object however often it is named; who walks the answer counts what it visits.
Opcodes: Lib/pickle.py and Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable

from ullage.errors import InvalidInput

MOST_CONTAINERS = 10_000_000
MOST_MEMO = 2 * MOST_CONTAINERS
MOST_MARKS = 64  # containers open at one time; a snapshot nests six deep
MOST_STACK = 1 << 16  # pickle fills a container 1,000 entries at a time
_BETWEEN_CHECKS = range(4096)  # opcodes; each makes one value at most
MOST_INT_BYTES = 9  # an unsigned 64-bit address
LARGEST_KEY = 1 << 60  # below the modulus of Python's hash of an int: no two keys of a dict share one

ALLOWED = "a pickle of dict, list, tuple, str, bytes, int, float, bool and None alone"
REMEDY = "write it with torch.cuda.memory._dump_snapshot(), and open a file that you do not trust nowhere else"

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

_long_gets = re.compile(rb"(?:j.{4}){1,1024}", re.DOTALL).match
_uint2 = struct.Struct("<H").unpack_from
_int4 = struct.Struct("<i").unpack_from
_uint4 = struct.Struct("<I").unpack_from
_gets = struct.Struct("<xI").iter_unpack
_float8 = struct.Struct(">d").unpack_from


def loads(data: bytes) -> object:
    """The value that a pickle (protocol 2 to 5) describes. Raises InvalidInput for anything else, and runs nothing."""
    if len(data) < 2 or data[0] != 0x80:
        raise _wrong("is no pickle of protocol 2 or later", shown(data))
    if not 2 <= data[1] <= 5:
        raise _wrong("has an unknown pickle protocol", data[1])
    machine = _Machine(data)
    try:
        return machine.run()
    except (IndexError, struct.error):
        raise _wrong("ends in the middle, or takes what it never gave", f"{len(data):,} bytes") from None
    except KeyError as error:
        raise _wrong("refers to what it never said", f"memo {error.args[0]!s:.20}") from None


def shown(data: bytes) -> str:
    """The first bytes of a file, safe to print."""
    return repr(data[:12]) if data else "an empty file"


def _wrong(what: str, value: object) -> InvalidInput:
    return InvalidInput(what, key="snapshot", value=value, allowed=ALLOWED, remedy=REMEDY)


class _Machine:
    """The stack, the memo, and what each opcode does to them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 2
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.containers = 0

    def run(self) -> object:
        while not self._advance():
            if len(self.stack) > MOST_STACK:
                raise _wrong("holds too many values at once", f"more than {MOST_STACK:,}")
            if len(self.memo) > MOST_MEMO:
                raise _wrong("remembers too many values", f"more than {MOST_MEMO:,}")
        if len(self.stack) != 1 or self.marks:
            raise _wrong("ends with containers open", f"{len(self.stack):,} values left")
        return self.stack[0]

    def _advance(self) -> bool:
        """Runs some opcodes; whether the last of all was among them. The most frequent ones are in line, the others by table."""
        data, stack, memo, at = self.data, self.stack, self.memo, self.at
        push = stack.append
        for _ in _BETWEEN_CHECKS:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET: a frames list is a run of them, taken at once
                run = _long_gets(data, at - 1)
                if run is None:
                    raise IndexError
                end = run.end()
                stack += [memo[index] for (index,) in _gets(data[at - 1 : end])]
                at = end
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                push(_uint2(data, at)[0])
                at += 2
            elif code == 0x4A:  # BININT
                push(_int4(data, at)[0])
                at += 4
            elif code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif code == 0x72:  # LONG_BINPUT
                memo[_uint4(data, at)[0]] = stack[-1]
                at += 4
            elif code == 0x2E:  # STOP
                return True
            else:
                self.at = at
                act = _ACTIONS.get(code)
                if act is None:
                    name = _NAMES.get(code, f"0x{code:02x}")
                    raise _wrong("asks for more than plain containers; refused, and nothing was run", f"opcode {name}")
                act(self)
                at = self.at
        self.at = at
        return False

    # -- values

    def take(self, n_bytes: int) -> bytes:
        """The next bytes; never more than there are."""
        found = self.data[self.at : self.at + n_bytes]
        if len(found) != n_bytes:
            raise IndexError
        self.at += n_bytes
        return found

    def sized(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "little"))

    def push(self, value: object) -> None:
        self.stack.append(value)

    def text(self, width: int) -> None:
        self.push(self.sized(width).decode("utf-8", "replace"))

    def long(self, width: int) -> None:
        digits = self.sized(width)
        if len(digits) > MOST_INT_BYTES:
            raise _wrong("holds an integer beyond 64 bits", f"{len(digits):,} bytes")
        self.push(int.from_bytes(digits, "little", signed=True))

    def float(self) -> None:
        self.push(_float8(self.take(8))[0])

    def frame(self) -> None:
        """How many bytes belong together: only a hint for streams."""
        self.take(8)

    # -- containers

    def container(self, value: object) -> None:
        self.containers += 1
        if self.containers > MOST_CONTAINERS:
            raise _wrong("holds too many containers", f"more than {MOST_CONTAINERS:,}")
        self.push(value)

    def mark(self) -> None:
        if len(self.marks) == MOST_MARKS:
            raise _wrong("is nested too deep", f"more than {MOST_MARKS} containers open")
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[object]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise IndexError
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def last(self, count: int) -> list[object]:
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise IndexError
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise _wrong("appends to what is no list", type(target).__name__)
        target.extend(values)

    def update(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise _wrong("sets an entry of what is no dict", type(target).__name__)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str) and not (type(key) is int and abs(key) < LARGEST_KEY):
                raise _wrong("has a key that is neither str nor int", type(key).__name__)
            target[key] = value

    def new_dict(self) -> None:
        values = self.since_mark()
        self.container({})
        self.update(values)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x95: _Machine.frame,
    0x4E: lambda machine: machine.push(None),  # NONE
    0x88: lambda machine: machine.push(True),  # NEWTRUE
    0x89: lambda machine: machine.push(False),  # NEWFALSE
    0x8A: lambda machine: machine.long(1),  # LONG1
    0x8B: lambda machine: machine.long(4),  # LONG4
    0x47: _Machine.float,  # BINFLOAT
    0x8C: lambda machine: machine.text(1),  # SHORT_BINUNICODE
    0x58: lambda machine: machine.text(4),  # BINUNICODE
    0x8D: lambda machine: machine.text(8),  # BINUNICODE8
    0x43: lambda machine: machine.push(machine.sized(1)),  # SHORT_BINBYTES
    0x42: lambda machine: machine.push(machine.sized(4)),  # BINBYTES
    0x8E: lambda machine: machine.push(machine.sized(8)),  # BINBYTES8
    0x28: _Machine.mark,  # MARK
    0x7D: lambda machine: machine.container({}),  # EMPTY_DICT
    0x5D: lambda machine: machine.container([]),  # EMPTY_LIST
    0x29: lambda machine: machine.container(()),  # EMPTY_TUPLE
    0x85: lambda machine: machine.container(tuple(machine.last(1))),  # TUPLE1
    0x86: lambda machine: machine.container(tuple(machine.last(2))),  # TUPLE2
    0x87: lambda machine: machine.container(tuple(machine.last(3))),  # TUPLE3
    0x74: lambda machine: machine.container(tuple(machine.since_mark())),  # TUPLE
    0x6C: lambda machine: machine.container(machine.since_mark()),  # LIST
    0x64: _Machine.new_dict,  # DICT
    0x61: lambda machine: machine.extend(machine.last(1)),  # APPEND
    0x65: lambda machine: machine.extend(machine.since_mark()),  # APPENDS
    0x73: lambda machine: machine.update(machine.last(2)),  # SETITEM
    0x75: lambda machine: machine.update(machine.since_mark()),  # SETITEMS
}
