"""What goes wrong in traced code, as one message each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ullage.errors import InvalidInput, UllageError, Unsupported
from ullage.trace.guard import place_of

_NO_FAKE = ("no fake impl", "fake impl", "register_fake", "meta implementation", "'Meta' backend")


@contextmanager
def told(part: str) -> Iterator[None]:
    """Turns whatever the body raises into a UllageError. part: "import", "factory" or "step"."""
    try:
        yield
    except UllageError:
        raise
    except (Exception, SystemExit) as error:
        raise _told(error, part) from error


def _told(error: BaseException, part: str) -> UllageError:
    place = place_of(error.__traceback__)
    cause = error.__cause__ if isinstance(error.__cause__, UllageError) else None
    if cause is not None:  # raised by the guard, wrapped by a library
        return cause
    if isinstance(error, fake_tensor.DataDependentOutputException | GuardOnDataDependentSymNode):
        return Unsupported(
            f"asks for the value of a tensor{_op(error)}, and a traced tensor has none",
            key=part,
            remedy="take .item(), .tolist(), print and branches on data out of it",
            place=place,
        )
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return Unsupported(
            f"makes a tensor whose shape depends on data{_op(error)}",
            key=part,
            remedy="a trace needs shapes that follow from shapes; use a mask or a fixed number of rows",
            place=place,
        )
    if isinstance(error, fake_tensor.UnsupportedOperatorException) or _lacks_fake(error):
        return Unsupported(
            f"runs an op that has no fake kernel{_op(error) or f': {_words(error)}'}",
            key=part,
            remedy="register one with torch.library.register_fake",
            place=place,
        )
    return InvalidInput(f"raises {type(error).__name__}: {_words(error)}", key=part, place=place)


def _op(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return f" ({func})" if func is not None else ""


def _lacks_fake(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError | RuntimeError) and any(words in text for words in _NO_FAKE)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or "(no message)"
