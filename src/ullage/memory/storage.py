"""What the replay of a block allocates: items of the ledger, and the storages that live while somebody holds them."""

from __future__ import annotations

from collections.abc import Iterator

from ullage import dtypes
from ullage.kernels.step import Buffer, WeightGrad
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up

Holder = tuple[str, object]
"""Who still needs a storage, and for what: ("saved", the step whose backward reads it), ("forward", the tensor's name)."""


class Items:
    """A block's allocations. Replays of one block share them, so that their programs can be mixed in one step."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, str], Item] = {}

    def tensor(self, buffer: Buffer, category: str, lives: str) -> Item:
        key = (buffer.name, buffer.bytes, category)
        if key not in self._made:
            self._made[key] = Item(
                category=category,
                what=buffer.what or buffer.name,
                bytes=round_up(buffer.bytes),
                formula=buffer.formula,
                lives=lives,
            )
        return self._made[key]

    def gradient(self, name: str, n_bytes: int, forward: Item) -> Item:
        """The gradient of a tensor, of which ``forward`` is the allocation; n_bytes: as rounded up."""
        key = (name, n_bytes, "gradient")
        if key not in self._made:
            self._made[key] = Item(
                category="transient",
                what=f"gradient of {forward.what}",
                bytes=n_bytes,
                formula=forward.formula,
                lives="its consumer's backward to its producer's",
            )
        return self._made[key]

    def weight_gradient(self, weight: WeightGrad, dtype: str) -> Item:
        key = (weight.param, weight.numel, dtype)
        if key not in self._made:
            self._made[key] = Item(
                category="gradients",
                what=f"gradient of {weight.param}",
                bytes=round_up(dtypes.size_bytes(weight.numel, dtype)),
                formula=f"{weight.numel} elements x {dtypes.bits(dtype) / 8:g} B ({dtype})",
                lives="its backward until the engine takes it",
            )
        return self._made[key]


class Storage:
    """One allocation and its holders. is_view: as a gradient it is a view of another tensor."""

    __slots__ = ("holders", "is_view", "item")

    def __init__(self, item: Item, *holders: Holder, is_view: bool = False) -> None:
        self.item = item
        self.is_view = is_view
        self.holders: set[Holder] = set(holders)


class Storages:
    """The storages of a block's tensors by name, and the program of what is allocated and freed meanwhile."""

    __slots__ = ("_named", "_nodes", "_view_bytes")

    def __init__(self) -> None:
        self._named: dict[str, Storage] = {}
        self._view_bytes: dict[str, int] = {}
        self._nodes: list[Node] = []

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __getitem__(self, name: str) -> Storage:
        return self._named[name]

    def __setitem__(self, name: str, storage: Storage) -> None:
        self._named[name] = storage

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def view(self, view: str | Buffer, tensor: str) -> None:
        """Names a view of a tensor: of all of it, or of a part that is a Buffer of its own size."""
        name = view.name if isinstance(view, Buffer) else view
        self._named[name] = self._named[tensor]
        self._view_bytes[name] = round_up(view.bytes) if isinstance(view, Buffer) else self.bytes_of(tensor)

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor and so of its gradient: of the view, where it is a view of something larger."""
        return self._view_bytes.get(name, self._named[name].item.bytes)

    def hold(self, name: str, holder: Holder) -> None:
        self._named[name].holders.add(holder)

    def let_go(self, name: str, holder: Holder) -> None:
        self.release(self._named[name], holder)

    def release(self, storage: Storage, holder: Holder) -> None:
        """Takes a holder away; with the last one the storage is freed."""
        if holder in storage.holders:
            storage.holders.remove(holder)
            if not storage.holders and storage.item.bytes:
                self._nodes.append(free(storage.item))

    def new(self, item: Item, *, is_view: bool = False) -> Storage:
        if item.bytes:
            self._nodes.append(alloc(item))
        return Storage(item, is_view=is_view)

    # -- the program

    def alloc(self, *items: Item) -> None:
        for item in items:
            if item.bytes:
                self._nodes.append(alloc(item))

    def free(self, *items: Item) -> None:
        for item in items:
            if item.bytes:
                self._nodes.append(free(item))

    @property
    def changes(self) -> int:
        """How many there are since the last program."""
        return len(self._nodes)

    def program(self) -> Sequence:
        """What has been written since the last call."""
        program = Sequence(self._nodes)
        self._nodes = []
        return program
