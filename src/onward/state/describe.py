"""What a run is, in plain data: configuration, tokenizer, data set, code and machine.

It goes into every manifest and is compared when resuming; what is a file goes into the checkpoint as an asset.
Nothing here uses the network, and nothing about the code's version or the machine can fail a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from onward.errors import ConfigurationError, FormatError, InvalidName, UnsupportedState
from onward.format.digests import sha256
from onward.format.names import distinct_paths
from onward.records import Description, JsonTree
from onward.state.surroundings import code_version, environment

ASSET_LIMIT = 100 * 1024 * 1024
"""Most bytes of one asset."""

KEPT_WITHOUT_ASKING = 32 * 1024 * 1024
"""A tokenizer up to this size is stored with every checkpoint; a larger one is only identified."""

_MAX_DEPTH = 64


@dataclass(frozen=True)
class RunDescription:
    """What ``describe`` returns, for the checkpointer.

    Attributes:
        description: The part that goes into the manifest; ``training_started`` is left for the run to fill in.
        assets: Files to store in each checkpoint: their path below ``assets/``, and content or where to read it.
        ties: Groups of parameter names that the model is meant to hold as one tensor.
    """

    description: Description
    assets: Mapping[str, bytes | Path] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()


def describe(
    model_config: object = None,
    tokenizer: object = None,
    dataset: object = None,
    hyperparameters: object = None,
    assets: Mapping[str, bytes | str | Path] | None = None,
    ties: Iterable[Iterable[str]] | None = None,
    code: bool = True,
) -> RunDescription:
    """Describes a run.

    Args:
        model_config: A dict, dataclass, argparse ``Namespace``, object with ``to_dict()``, or a string.
        tokenizer: A path to its file or folder, an object with ``get_vocab()``, or a name. (A string is a path if
            something lies there.) Its files, or its vocabulary, are stored as assets where they are small.
        dataset: As ``model_config``; say what identifies the data (name, revision, digest).
        hyperparameters: As ``model_config``.
        assets: More files to store with each checkpoint: a relative path, and content or the file's place.
        ties: Groups of parameter names that are one tensor, for example ``[("wte.weight", "lm_head.weight")]``.
        code: Whether to note the version of the code; reads the git repository of the main script, if there is one.

    Raises:
        UnsupportedState: Something has no exact form in JSON; the message names its path.
        InvalidName: An asset's name is not a safe relative path.
        ConfigurationError: An asset or tokenizer file is missing or too large.
    """
    model = plain(model_config, "model_config")
    tuned = plain(hyperparameters, "hyperparameters")
    identity, files = _tokenizer(tokenizer)
    for name, tree in (("model_config.json", model), ("hyperparameters.json", tuned)):
        if isinstance(tree, dict):
            files[name] = _pretty(tree)
    for name, given in (assets or {}).items():
        files[name] = given if isinstance(given, bytes) else Path(given)
    _require_storable(files)
    return RunDescription(
        description=Description(
            model_config=model,
            tokenizer=identity,
            dataset=plain(dataset, "dataset"),
            hyperparameters=tuned,
            code=code_version() if code else None,
            environment=environment(),
        ),
        assets=files,
        ties=_tie_groups(ties or ()),
    )


# --- plain data ----------------------------------------------------------------------------------------------------


def plain(value: Any, path: str, depth: int = 0) -> JsonTree:
    """``value`` as JSON: mappings with string keys, lists, strings, finite numbers, booleans, None.

    Configuration objects become mappings, tuples lists, integer keys strings; paths, enums and torch dtypes what
    they stand for. What has no such form is refused.

    Raises:
        UnsupportedState: Names the path of what cannot be represented.
    """
    if depth > _MAX_DEPTH:
        raise UnsupportedState(f"{path[:200]} is nested more than {_MAX_DEPTH} deep, or contains itself")
    if isinstance(value, Enum):
        return plain(value.value, path, depth + 1)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return _scalar(value, path)
    if isinstance(value, PurePath | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(element, f"{path}[{index}]", depth + 1) for index, element in enumerate(value)]
    if (fields := _fields(value)) is not None:
        tree: dict[str, JsonTree] = {}
        for key, element in fields.items():
            if not isinstance(key, str) and type(key) is not int:
                raise UnsupportedState(f"{path} has the key {key!r}; only strings and integers can be keys")
            if str(key) in tree:
                raise UnsupportedState(f"{path} has the key {key!r} both as a string and as an integer")
            tree[str(key)] = plain(element, f"{path}.{key}", depth + 1)
        return tree
    raise UnsupportedState(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which has no exact form in JSON",
        next_step="leave it out, or replace it by the plain values that matter",
    )


def _scalar(value: float | str, path: str) -> JsonTree:
    if isinstance(value, str):
        if any(0xD800 <= ord(character) < 0xE000 for character in value):
            raise UnsupportedState(f"{path} has half a surrogate pair, which is no text")
        return str.__str__(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise UnsupportedState(f"{path} is {value:#x}, more than 64 bits", next_step="use a string")
        return int(value)
    if not math.isfinite(value):
        raise UnsupportedState(f"{path} is {value}, which JSON cannot hold", next_step="use None or a string")
    return float(value)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if isinstance(value, type):
        return None
    if callable(to_dict := getattr(value, "to_dict", None)):
        made = to_dict()
        return made if isinstance(made, Mapping) else None
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return None


def _pretty(tree: JsonTree) -> bytes:
    return (json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


# --- tokenizer, assets, ties ---------------------------------------------------------------------------------------


def _tokenizer(tokenizer: Any) -> tuple[JsonTree, dict[str, bytes | Path]]:
    """What identifies the tokenizer, and the files of it that are small enough to be stored."""
    if tokenizer is None:
        return None, {}
    if callable(get_vocab := getattr(tokenizer, "get_vocab", None)):
        vocabulary = plain(get_vocab(), "tokenizer.get_vocab()")
        content = _pretty(vocabulary)
        name = type(tokenizer).__qualname__
        identity = {"kind": "vocabulary", "class": name, "size": len(vocabulary), "sha256": sha256(content)}
        return identity, {"tokenizer/vocab.json": content} if len(content) <= KEPT_WITHOUT_ASKING else {}
    if isinstance(tokenizer, str) and not (tokenizer and os.path.exists(tokenizer)):
        return {"kind": "name", "name": plain(tokenizer, "tokenizer")}, {}
    if not isinstance(tokenizer, str | PurePath):
        return plain(tokenizer, "tokenizer"), {}
    place = Path(tokenizer)
    if not place.exists():
        raise ConfigurationError(f"the tokenizer {place} is not there")
    sizes = {name: (file, file.stat().st_size) for name, file in _files_of(place).items()}
    files = {name: file for name, (file, size) in sizes.items() if size <= ASSET_LIMIT}
    identity = {
        "kind": "files",  # digests and names alone: the folder lies elsewhere on the next machine
        "files": {name: sha256(_read(file, f"the tokenizer file {name}")) for name, file in files.items()},
        # Weights that lie beside a tokenizer would take minutes to digest.
        "not_read": {name: size for name, (_, size) in sizes.items() if name not in files},
    }
    small = sum(sizes[name][1] for name in files) <= KEPT_WITHOUT_ASKING
    return identity, {f"tokenizer/{name}": file for name, file in files.items()} if small else {}


def _files_of(place: Path) -> dict[str, Path]:
    if place.is_file():
        return {place.name: place}
    files = {file.relative_to(place).as_posix(): file for file in place.rglob("*") if file.is_file()}
    return {name: files[name] for name in sorted(files) if not any(part.startswith(".") for part in name.split("/"))}


def _read(file: Path, what: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read: {error}") from error


def _require_storable(assets: Mapping[str, bytes | Path]) -> None:
    try:
        distinct_paths(list(assets))
    except FormatError as error:
        raise InvalidName(
            f"asset: {error.message}", next_step="use a relative path such as 'config/train.yaml'"
        ) from error
    for name, content in assets.items():
        if isinstance(content, Path) and not content.is_file():
            raise ConfigurationError(f"the asset {name!r} is not a file: {content}")
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size > ASSET_LIMIT:
            raise ConfigurationError(
                f"the asset {name!r} has {size} bytes, more than the {ASSET_LIMIT} that a checkpoint stores",
                next_step="leave it out, and describe it by its digest in `dataset` or `hyperparameters`",
            )


def _tie_groups(ties: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    groups = []
    for group in ties:
        names = () if isinstance(group, str) else tuple(group)
        if len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"a tie is a group of at least two parameter names, not {group!r}")
        groups.append(names)
    return tuple(groups)
