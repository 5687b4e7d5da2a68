"""Checkpoints: one safetensors file, replaced in one step, so that a crash leaves the old one or the new one.

No pickle: tensors go in as tensors, everything else as JSON in the file's header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tacit.privacy.files import opened, replace_whole
from tacit.privacy.validation import UserError

_TENSOR = "tensor:"
_HASH = "sha256"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole, on the disk, or leave it as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "note", b"hello")
    ...     (Path(folder) / "note").read_bytes()
    b'hello'
    """
    try:
        replace_whole(path, content)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room or choose another --out. What was saved is unharmed"
        ) from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and JSON facts in one safetensors file, replaced atomically; their hash is in it, so that damage is noticed."""
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    write_atomically(path, save(plain, metadata={"tacit": json.dumps({**facts, _HASH: _hash_of(plain, facts)})}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote; a `UserError` for anything else, also if one bit of it is another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors(Path(folder) / "a", {"weight": torch.ones(1)}, {"steps": 3})
    ...     load_tensors(Path(folder) / "a")
    ({'weight': tensor([1.])}, {'steps': 3})
    """
    try:
        with opened(path), safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["tacit"])
            if not isinstance(facts, dict):
                raise ValueError("its facts are no table")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            # files of before had no hash
            if facts.pop(_HASH, None) not in (None, _hash_of(tensors, facts)):
                raise ValueError("what it holds has changed since")
            return tensors, facts
    except FileNotFoundError:
        raise UserError(f"there is no {path}") from None
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, OSError, RuntimeError) as error:
        reason = str(getattr(error, "strerror", None) or error)[:200]  # RuntimeErrors are torch's, and of deep nesting
        raise UserError(f"{path} is damaged or was not written by tacit: {reason}") from None


def _hash_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """SHA-256 of the facts and of every tensor: its name, type, shape and numbers."""
    as_read = json.loads(json.dumps(facts))  # whose keys are words
    found = hashlib.sha256(json.dumps(as_read, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def pack(state: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A state dict as JSON, its tensors moved into `tensors` under names that start with `name`.

    >>> tensors = {}
    >>> pack({"step": 3, "buffers": [torch.ones(2)]}, tensors, "optimizer")
    {'step': 3, 'buffers': ['tensor:optimizer.buffers.0']}
    """
    if isinstance(state, Tensor):
        tensors[name] = state
        return _TENSOR + name
    if isinstance(state, dict):
        return {str(key): pack(value, tensors, f"{name}.{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [pack(value, tensors, f"{name}.{index}") for index, value in enumerate(state)]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise UserError(f"{name} holds a {type(state).__name__}, which cannot be stored in a checkpoint")


def unpack(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The opposite of `pack`, with the whole-number keys of a state dict as numbers again.

    >>> unpack({"0": {"momentum": "tensor:a"}}, {"a": torch.ones(1)})
    {0: {'momentum': tensor([1.])}}
    """
    if isinstance(state, str) and state.startswith(_TENSOR):
        return tensors[state.removeprefix(_TENSOR)]
    if isinstance(state, dict):
        return {int(key) if key.isdecimal() else key: unpack(value, tensors) for key, value in state.items()}
    if isinstance(state, list):
        return [unpack(value, tensors) for value in state]
    return state


def load_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Put stored weights into a model; one of another shape is refused by name."""
    check_shapes(model, tensors, where)
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:  # of a kind that cannot be turned into the model's, such as packed numbers
        raise UserError(f"{where} is damaged or was not written by tacit: {str(error)[:200]}") from None


def check_shapes(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuse stored weights of other names or shapes than the model's."""
    own = model.state_dict()
    for name in sorted(set(own) | set(tensors)):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            ours, theirs = (list(found[name].shape) if name in found else "absent" for found in (own, tensors))
            raise UserError(f"{where} is a checkpoint of another model: {name!r} is {theirs} there and {ours} here")
