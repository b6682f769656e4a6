"""Runs two steps of any module on fake tensors, as one rank of a world of any size, and returns what they allocated."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ullage.errors import InvalidInput
from ullage.trace import sharded
from ullage.trace.events import Trace
from ullage.trace.failures import told
from ullage.trace.guard import guarded
from ullage.trace.hooks import as_in_a_run, watching
from ullage.trace.like import cuda as like_cuda
from ullage.trace.patch import replaced
from ullage.trace.recorder import Recorder

Factory = Callable[[], tuple[nn.Module, Any, Callable[[], object]]]
"""Returns a model, its optimizer (None: there is none) and a function that runs one whole step, from forward to zero_grad."""

STEPS = 2
"""The second is the steady one: optimizer states exist from its start."""

_SHAPE = "(model, optimizer or None, a function that runs one step)"


def trace(
    factory: Factory,
    *,
    name: str = "",
    steps: int = STEPS,
    rank: int = 0,
    world: int = 1,
    like: str = "cuda",
    ops: bool = False,
) -> Trace:
    """The allocations of ``steps`` steps of what ``factory`` returns, run on fake tensors as one rank of ``world``.

    like: "cuda" or "cpu", whose choices are taken where torch makes them by the device (like.py). ops: with what ran in the last
    step, for graph.py.

    Raises Unsupported where the code asks for values or has an op that fake tensors do not know, InvalidInput where it fails.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake=mode)
    if ops:
        recorder.ops = []
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_process_group(rank, world))
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(watching(recorder))
        if like == "cuda":
            stack.enter_context(like_cuda())
        return record(recorder, factory, name=name, steps=steps, rank=rank, world=world)


def record(
    recorder: Recorder,
    factory: Factory,
    *,
    name: str = "",
    steps: int = STEPS,
    rank: int = 0,
    world: int = 1,
    trusted: bool = False,
) -> Trace:
    """Runs a factory and its steps under a recorder that is entered and watching: fake, or real to hold a fake one against.

    trusted: it is our own code, which nothing watches over.
    """
    with _watched_over("factory", trusted):
        made: Any = factory()
    model, optimizer, step = _checked(made)
    recorder.begin(model, optimizer)
    with as_in_a_run() if recorder.fake is not None else nullcontext():  # of what the factory has imported
        for number in range(1, steps + 1):
            recorder.begin_step(number)
            with _watched_over("step", trusted):
                step()
    sharded.tag_gathered(recorder, model)
    return recorder.trace(name or type(model).__name__, rank=rank, world=world)


@contextmanager
def _watched_over(part: str, trusted: bool) -> Iterator[None]:
    if trusted:
        yield
        return
    with told(part), guarded(part):
        yield


def _checked(made: Any) -> tuple[nn.Module, Any, Callable[[], object]]:
    if not isinstance(made, tuple | list) or len(made) != 3:
        raise InvalidInput(f"returned {_shown(made)}", key="factory", allowed=_SHAPE)
    model, optimizer, step = made
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"returned {_shown(model)} as the model", key="factory", allowed="a torch.nn.Module")
    if not callable(step):
        raise InvalidInput(
            f"returned {_shown(step)} as the step", key="factory", allowed="a function without arguments"
        )
    return model, optimizer, step


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# -- a factory by name


def factory_named(spec: str) -> Factory:
    """The function that ``module:function`` or ``file.py:function`` names; its module is imported, guarded."""
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute.isidentifier():
        raise InvalidInput(
            "names no factory", key="factory", value=spec[:80], allowed="module:function or file.py:function"
        )
    with told("import"), guarded("import"):
        module = _imported(place)
    found = getattr(module, attribute, None)
    if found is None:
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise InvalidInput(
            f"{place} has no {attribute}",
            key="factory",
            value=spec[:80],
            allowed=", ".join(known[:8]) or "it has no functions",
        )
    if not callable(found):
        raise InvalidInput("is no function", key="factory", value=spec[:80])
    factory: Factory = found
    return factory


def _imported(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise InvalidInput("there is no such file", key="factory", value=place[:80])
        known = sys.modules.get(path.stem)
        if known is not None and os.path.realpath(getattr(known, "__file__", None) or "") == os.path.realpath(path):
            return known
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        with _on_path(str(path.parent.resolve())):
            spec.loader.exec_module(module)
        return module
    with _on_path(os.getcwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                raise InvalidInput(
                    "there is no such module",
                    key="factory",
                    value=place[:80],
                    remedy="run in its folder, or name its file",
                ) from None
            raise


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# -- surroundings


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log an error's stack before they raise it; garbage is collected between phases, not at a moment of its own choice.

    What a caller has frozen (gc.freeze) stays so: there is no thawing a part.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    collects, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # what is there already is not looked at again: collecting between phases then costs little
    gc.disable()
    try:
        yield
    finally:
        log.setLevel(level)
        if not is_frozen:
            gc.unfreeze()
        if collects:
            gc.enable()


@contextmanager
def _process_group(rank: int, world: int) -> Iterator[None]:
    """torch's fake process group: collectives return at once and do nothing, one rank stands for all."""
    if world == 1:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world:
        raise InvalidInput("is no rank of it", key="rank", value=rank, allowed=f"0 to {world - 1}")
    surroundings = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    before = {key: os.environ.get(key) for key in surroundings}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    os.environ.update(surroundings)
    try:
        with replaced(dist, "init_process_group", lambda *_, **__: None):  # a script's own call finds it done
            yield
    finally:
        dist.destroy_process_group()
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def real(factory: Factory, *, name: str = "", steps: int = STEPS, trusted: bool = False) -> Trace:
    """The same record of a real run on this machine: what a trace is held against. Runs the code for real."""
    recorder = Recorder()
    with _quiet(), recorder, watching(recorder):
        torch.manual_seed(0)
        return record(recorder, factory, name=name, steps=steps, trusted=trusted)
