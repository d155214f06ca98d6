"""A small training state made by hand, and a reader of checkpoints that shares no code with Onward's own.

No torch here: the processes of the sweeps are forked many hundred times, and what is tested needs none of it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
from collections.abc import Callable, Iterable, Mapping
from math import prod

import safetensors

from onward.format.dtypes import itemsize, stored_dtype
from onward.records import FORMAT, ComponentTag, Description, Key, Layout, TensorLayout
from onward.save.captured import Captured, SaveContext, staged
from onward.save.plan import plan

SHAPES: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("wte", "float32", (128, 64)),
    ("ln", "bfloat16", (16,)),
    ("scale", "float32", ()),
    ("empty", "float16", (0, 4)),
    ("mask", "bool", (33,)),
    ("steps", "int64", (3,)),
    ("phase", "complex64", (5,)),
    ("head", "float32", (16, 40)),
)
SMALL_FILES = 4096
"""Bytes after which the sweeps close a shard file, so that the small state fills several."""
assert plan.__kwdefaults__ is not None
DEFAULT_SMALLEST_FILE: int = plan.__kwdefaults__["smallest"]

Contents = Mapping[str, bytes]
Bytes = bytes | bytearray | memoryview


def many_small_files() -> None:
    """Makes the plan of shards deal even the small state out to several files, so that several threads write."""
    assert plan.__kwdefaults__ is not None
    plan.__kwdefaults__["smallest"] = SMALL_FILES


def tensor_bytes(step: int, name: str, count: int) -> bytes:
    """The bytes of a tensor at a step: every step has others, and so has every tensor."""
    return random.Random(f"{step} {name}").randbytes(count)


def key(name: str) -> str:
    """The key under which the state's tensors are stored."""
    return json.dumps(["model", name], separators=(",", ":"))


def captured(step: int) -> Captured:
    """The whole state at a step, as capture would hand it to the writer."""
    drawn = (
        (name, dtype, shape, tensor_bytes(step, name, prod(shape) * itemsize(dtype))) for name, dtype, shape in SHAPES
    )
    return handed_over(step, drawn)


def tiny_tensors(count: int) -> Captured:
    """Very many tensors of 1 to 8 elements."""
    return handed_over(5, ((f"t{at}", "uint8", (1 + at % 8,), bytes([at % 251] * (1 + at % 8))) for at in range(count)))


def handed_over(step: int, drawn: Iterable[tuple[str, str, tuple[int, ...], Bytes]]) -> Captured:
    """A captured state that holds these tensors: name, dtype, shape, bytes."""
    data: dict[Key, Bytes] = {}
    tensors: list[TensorLayout] = []
    for name, dtype, shape, content in drawn:
        data[key(name)] = content
        tensors.append(TensorLayout(key=key(name), dtype=dtype, shape=shape, stored=stored_dtype(dtype)))
    layout = Layout(format=FORMAT, meshes=(), tensors=tuple(sorted(tensors, key=lambda t: t.key)))
    planned = plan(layout.tensors)
    # Whole pages, as real staging memory is: only from such can be written past the page cache.
    memory = memoryview(mmap.mmap(-1, max(planned.arena_bytes, 1)))
    for piece in (piece for file in planned.files for piece in file.pieces):
        memory[piece.start : piece.start + piece.nbytes] = data[piece.key][piece.offset : piece.offset + piece.nbytes]
    tags = (
        ComponentTag(name="model", kind="model", scope="global", step=step),
        ComponentTag(name="rng", kind="rng", scope="rank", step=step),
    )
    return Captured(
        step=step,
        layout=layout,
        plan=planned,
        state={"model": {"step": step}, "rng": {"seed": step * 7}},
        tags=tags,
        region=staged(memory),
        started="2026-01-01T00:00:00.000000Z",
        seconds=0.0,
    )


def context() -> SaveContext:
    """What is said about every checkpoint of the sweeps; it has an asset, so that there is a folder for it."""
    return SaveContext(
        description=Description(model_config={"n_heads": 2}),
        training_started="2026-01-01T00:00:00.000000Z",
        assets={"vocabulary.txt": b"a\nb\n"},
    )


def contents_of(step: int) -> Contents:
    """What a checkpoint of a step must hold."""
    held = {key(name): tensor_bytes(step, name, prod(shape) * itemsize(dtype)) for name, dtype, shape in SHAPES}
    held["state"] = json.dumps({"model": {"step": step}, "rng": {"seed": step * 7}}, sort_keys=True).encode()
    held["asset"] = b"a\nb\n"
    return held


def read_contents(read: Callable[[str], bytes]) -> Contents:
    """What a checkpoint holds, by stock safetensors, json and hashlib alone; ``read`` gives a file of its folder.

    Raises:
        AssertionError, KeyError, ValueError: It is not whole.
    """
    sums = {}
    for line in read("manifest.sha256").decode().splitlines():
        digest, _, path = line.partition("  ")
        sums[path] = digest
        assert hashlib.sha256(read(path)).hexdigest() == digest, f"{path} does not match its checksum"
    parts: dict[str, dict[int, bytes]] = {}
    for path in sums:
        if path.endswith(".safetensors"):
            for name, entry in safetensors.deserialize(read(path)):
                tensor, _, offset = name.rpartition("]")
                first = int(offset[1:].split(",")[0]) if offset else 0
                parts.setdefault(f"{tensor}]", {})[first] = bytes(entry["data"])
    held = {tensor: b"".join(boxes[at] for at in sorted(boxes)) for tensor, boxes in parts.items()}
    components = json.loads(read("rank-00000/state.json"))["components"]
    held["state"] = json.dumps(components, sort_keys=True).encode()
    held["asset"] = read("assets/vocabulary.txt")
    return held
