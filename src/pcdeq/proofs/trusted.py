"""Is a module what its class says? Proofs go by what is computed, not by what it is called.

A class is known by the methods that it has when it is first asked about. A module of it, or of a subclass, computes
what the class computes if none of them was replaced, in a subclass, on the instance or in the class itself, and if no
hook stands before or behind it. Data, such as weights and options, are read as the module itself would read them, so
that parametrised weights are what they evaluate to.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from pcdeq.activations import Activation
from pcdeq.errors import UsageError
from pcdeq.operators import LinearMap, Operator
from pcdeq.sparse import SparseMap

# What has no part in a forward pass: how a module is made, copied, stored and shown.
HARMLESS = {"__init__", "__new__", "__init_subclass__", "__annotate__", "__annotate_func__", "reset_parameters"}
HARMLESS |= {"__repr__", "extra_repr", "train", "__getstate__", "__setstate__", "__deepcopy__", "__reduce__"}
HARMLESS |= {"state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict"}
# Beyond that, what a subclass of a known class may have of its own.
MAY_OVERRIDE: dict[type, frozenset[str]] = {Operator: frozenset(("bind", "check_input"))}
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def know(known: type, may_override: Iterable[str] = ()) -> None:
    """Know a class by the methods that it has now."""
    MAY_OVERRIDE[known] = frozenset(may_override)
    _methods(known)


def why_changed(module: nn.Module, known: type) -> str | None:
    """Which method of a module is not that of the known class; None if all are."""
    now = _attributes(type(module))
    for name, method in _methods(known).items():
        if name in vars(module):
            return f"its {name} is set on the instance: nothing is known about what it computes"
        if now.get(name) is not method:
            return f"its {name} is overridden: nothing is known about what it computes"
    return "its _compiled_call_impl is not its own: nothing is known about it" if is_miscompiled(module) else None


def is_miscompiled(module: nn.Module) -> bool:
    """Whether what a module calls as its compiled self is something else."""
    compiled = module._compiled_call_impl
    return compiled is not None and getattr(compiled, "_torchdynamo_orig_callable", None) != module._call_impl


def why_hooked(module: nn.Module) -> str | None:
    """Which hook may change what goes into a module or comes out of it; None if there is none."""
    for kind in HOOKS:
        for hook in getattr(module, f"_{kind}").values():
            name = kind.removesuffix("s").replace("_", " ")
            if isinstance(hook, WeightNorm | SpectralNorm):
                which = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
                return f"torch.nn.utils.{which} works by a {name}: use torch.nn.utils.parametrizations.{which}"
            return f"it has a {name}, which may change anything: remove it"
    return None


def why_all_hooked() -> str | None:
    """The same for the hooks that torch calls around every module."""
    for kind in HOOKS:
        if getattr(hooks, f"_global_{kind}"):
            name = kind.removesuffix("s").replace("_", " ")
            return f"a global {name} is set, which may change what any module computes: remove it"
    return None


def why_unknown_layer(layer: Any, known: type) -> str | None:
    """Why a layer may solve another equation than z = s(Wz + inject(x)), W >= 0; None if it is that of ``known``."""
    if reason := why_changed(layer, known):
        return reason
    if not isinstance(layer.operator, Operator) or type(layer.activation) is not Activation:
        return "its operator must be a pcdeq.Operator, and its activation a pcdeq.Activation"
    if reason := why_changed(layer.operator, Operator):
        return f"of its operator {type(layer.operator).__name__} {reason.removeprefix('its ')}"
    if not (layer.floor > 0 or (layer.activation.kind == 2 and layer.floor == 0)):
        return f"its floor is {layer.floor}, so that the input of its equation may be too small: make a new layer"
    return None


def require_known_layer(layer: Any, known: type) -> None:
    """Refuse an equilibrium layer about whose outputs and gradients nothing can be said; ``known`` is `pcdeq.PcDEQ`."""
    reason = why_unknown_layer(layer, known) or why_hooked(layer) or why_all_hooked()
    if reason is None and layer.injection is not None:
        reason = OWN_INJECTION
    if reason is not None:
        raise UsageError(f"{type(layer).__name__}: {reason}")


# So many numbers may be computed to try out an operator of a user's, and so many random vectors with their images.
TRIAL, RANDOM_VECTORS = 2**20, 4


def require_nonnegative(linear: LinearMap, like: Tensor, *, adjoint: bool = False) -> None:
    """Refuse a map that is not nonnegative: our own by its weight, a user's by a trial, once for each shape."""
    tried: set[Any] = vars(linear).setdefault("_tried", set())
    what = (like.shape[1:], adjoint)
    if what in tried:
        return
    if reason := why_negative(linear, like, adjoint=adjoint):
        raise UsageError(f"{type(linear).__name__}: {reason}; nothing can be proved with it")
    tried.add(what)


def why_negative(linear: LinearMap, like: Tensor, *, adjoint: bool = False) -> str | None:
    """What shows that a map, or its adjoint, makes negative numbers of nonnegative ones; None if nothing does.

    The images of all unit vectors show it for sure, and are computed while there are few; else those of some of them,
    and of random vectors and their images, which is no more than a sample (see `tried_units`).
    """
    if is_known_map(linear):
        least = linear.weight.detach().amin()
        return f"its weight has negative entries, the smallest {float(least):.3g}" if bool(least < 0) else None
    units, state, n = tried_units(like.shape[1:]), like.shape[1:], like.shape[1:].numel()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(n, generator=generator)[:units]
    vectors = torch.zeros(units, n).scatter_(1, chosen[:, None], 1.0)
    vectors = torch.cat([vectors, torch.rand(RANDOM_VECTORS, n, generator=generator)]).to(like).reshape(-1, *state)
    apply = linear.adjoint if adjoint else linear.apply
    images = apply(vectors)
    if not bool((images < 0).any()):
        images = apply(images[units:])
    if not bool((images < 0).any()):
        return None
    name = "its adjoint" if adjoint else "it"
    return f"{name} maps nonnegative numbers to negative ones, down to {float(images.amin()):.3g}"


def is_known_map(linear: LinearMap) -> bool:
    """Whether a map is one of ours, which its weight decides."""
    return linear.kind is not None or type(linear) is SparseMap


def tried_units(state: torch.Size) -> int:
    """How many unit vectors of a state `why_negative` tries: all that there are, or what is affordable."""
    return min(state.numel(), max(1, TRIAL // max(1, state.numel())))


OWN_INJECTION = (
    "it has an injection of your own, of which nothing is known: the paper's are monotone, with known slopes"
)


@cache
def _methods(known: type) -> dict[str, Any]:
    """What a class does when it is called, raw as the class holds it."""
    harmless = HARMLESS | MAY_OVERRIDE.get(known, frozenset())
    found = _attributes(known).items()
    return {name: item for name, item in found if name not in harmless and _is_method(item)}


def _is_method(item: Any) -> bool:
    return not isinstance(item, type) and (callable(item) or isinstance(item, property | classmethod | staticmethod))


def _attributes(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found.update(vars(base))
    return found
