"""Layers that are known to mix examples or to remember them, refused by name before anything runs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from tacit.privacy.validation import UserError


def refuse_known_mixers(model: nn.Module) -> None:
    """Refuse what no per-example clipping can bound.

    *Guarantee.* No layer of PyTorch that computes statistics over the batch, keeps running statistics of the data, or
    rescales by how often a token occurs passes unnoticed, whatever it is called in a subclass.

    >>> refuse_known_mixers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: '1' (BatchNorm2d) normalises each example by statistics of the whole batch, so no
    clipping bounds what one example does; replace it: tacit.models.without_batch_norm(model)
    """
    for name, module in model.named_modules():
        problem = _problem(module)
        if problem:
            raise UserError(f"{described(name, module)} {problem}")


def described(name: str, module: nn.Module) -> str:
    """How an error names a module.

    *Guarantee.* The qualified name, as `model.get_submodule` takes it.

    >>> described("block.0", nn.ReLU()), described("", nn.ReLU())
    ("'block.0' (ReLU)", 'the model itself (ReLU)')
    """
    return f"{name!r} ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"


def _problem(module: nn.Module) -> str | None:
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "is lazy and not yet initialised; run the model once on an example of public data"
    if isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            return (
                "keeps running statistics of the training data, which leave with the model and have no noise; "
                "set track_running_stats=False"
            )
        return None
    if isinstance(module, _BatchNorm):
        frozen = not any(p.requires_grad for p in module.parameters(recurse=False))
        if module.training or not module.track_running_stats or module.running_mean is None or not frozen:
            return (
                "normalises each example by statistics of the whole batch, so no clipping bounds what one example does; "
                "replace it: tacit.models.without_batch_norm(model)"
            )
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "changes its weights by the tokens it sees, without noise; set max_norm=None"
        if module.scale_grad_by_freq:
            return "scales gradients by how often a token is in the whole batch; set scale_grad_by_freq=False"
    return None
