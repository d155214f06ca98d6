"""What a component's state looks like after it was written as JSON and bytes, and read back."""

from __future__ import annotations

import json

import torch

from onward.state.component import Component
from onward.state.snapshot import rebuild, take


def stored(component: Component) -> object:
    """The state as ``load`` gets it: through JSON, its tensors fresh and on the CPU."""
    snapshot = take([component], 0)
    owners = {entry.key: entry.tie or entry.key for entry in snapshot.layout.tensors}
    copies = {key: tensor.detach().cpu().clone() for key, tensor in snapshot.tensors.items()}
    tree = json.loads(json.dumps(snapshot.state[component.name]))
    return rebuild(tree, lambda key: copies[owners[key]].clone())


def stored_on_meta(component: Component) -> object:
    """The state as ``check`` may get it: tensors without their bytes."""
    snapshot = take([component], 0)
    owners = {entry.key: entry.tie or entry.key for entry in snapshot.layout.tensors}
    metas = {key: torch.empty_like(tensor, device="meta") for key, tensor in snapshot.tensors.items()}
    tree = json.loads(json.dumps(snapshot.state[component.name]))
    return rebuild(tree, lambda key: metas[owners[key]])
