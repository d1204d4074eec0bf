"""The one recogniser: what a network consists of, for every proof and whatever else goes through it layer by layer.

A module becomes a list of known layers (`pcdeq.proofs.kinds`), or is refused by name. Known is what is computed:
exactly known classes with their own methods, no hooks, in evaluation mode where it matters. Containers in line are
walked through, so that a module that is used twice stands in the list twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from pcdeq import residual
from pcdeq.errors import UsageError
from pcdeq.proofs import curves, kinds, trusted, windows
from pcdeq.proofs.composed import Residual, Unknown
from pcdeq.proofs.kinds import Linear
from pcdeq.proofs.rules import KINDS, Entry, Layer

# Where kinds are said; those of a module are known once it is imported.
KINDS_FROM = (kinds, windows, curves)
# Classes whose forward calls their children one after the other.
_CONTAINERS: set[type[nn.Module]] = set()


def know_container(known: type[nn.Sequential], may_override: Iterable[str] = ()) -> None:
    """Know a container of layers in line, whose subclasses may have some methods of their own."""
    trusted.know(known, may_override)
    _CONTAINERS.add(known)


def know_twin(known: type[nn.Module], plain: type[nn.Module]) -> None:
    """Know a class that computes what one of torch's computes, from the same options and tensors, in another way."""
    trusted.know(known)
    KINDS[known] = Entry(KINDS[plain].kind, plain)


know_container(nn.Sequential)
know_container(residual.Residual)


def recognise(model: nn.Module, *, training: bool = False, leave_unknown: bool = False) -> list[Layer]:
    """The known layers of a model, in the order of its forward pass; a `UsageError` names what is not known.

    Args:
        training: layers may be in training mode.
        leave_unknown: what is not known becomes an `Unknown` layer, which knows why, except for the model itself.

    >>> import pcdeq
    >>> block = nn.Sequential(pcdeq.Residual(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    >>> [type(layer).__name__ for layer in recognise(nn.Sequential(nn.Flatten(), block))]
    ['Flatten', 'Residual', 'Linear']
    >>> recognise(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    Traceback (most recent call last):
    pcdeq.errors.UsageError: 1 (GELU): nothing is known about this kind of layer; known are Sequential, Residual, ...
    """
    if reason := trusted.why_all_hooked():
        raise UsageError(reason)
    layers = list(_walk(model, "", training, in_residual=False))
    for layer in all_layers(layers):
        if isinstance(layer, Unknown) and (not leave_unknown or layer.module is model):
            layer.refuse(layer.reason)
        if not training and _is_training(layer):
            layer.refuse("it is in training mode, in which it computes something else: call eval() first")
    return layers


def split_classifier(who: str, model: nn.Module, *, training: bool = False) -> tuple[list[Layer], Linear]:
    """The known layers of a network, and the linear classifier that they end in; ``who`` wants them so."""
    layers = recognise(model, training=training) if isinstance(model, nn.Sequential) else []
    if not layers or not isinstance(layers[-1], Linear):
        raise UsageError(f"{who} wants a torch.nn.Sequential of layers that end in a Linear classifier")
    return layers[:-1], layers[-1]


def require_features(classifier: Linear, x: Tensor) -> None:
    """Refuse an input of a classifier that is not one row of features for each sample."""
    if x.ndim != 2:
        classifier.refuse(f"the classifier's input must be (n, features), not {tuple(x.shape)}: flatten it")


def all_layers(layers: Iterable[Layer]) -> Iterator[Layer]:
    """The layers, and those in residual branches."""
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from all_layers(layer.layers)


def _is_training(layer: Layer) -> bool:
    """Whether a layer is in training mode where that matters, or may do so."""
    parts = layer.module.modules() if isinstance(layer.module, nn.Module) else ()
    if isinstance(layer, Unknown):
        return any(part.training for part in parts)
    # A parametrised weight may be another one in training mode, as with spectral norm.
    parametrised = any(part.training for part in parts if isinstance(part, ParametrizationList))
    return parametrised or (layer.varies and layer.module.training)


def _walk(module: Any, path: str, training: bool, in_residual: bool) -> Iterator[Layer]:
    name, known = path or "model", _known_class(module)
    reason = _why_unknown(module, known, training, in_residual)
    if known is None or reason is not None:
        yield Unknown(module, name, reason or "")
        return
    if known in KINDS:
        entry = KINDS[known]
        yield entry.kind(module, name, entry.plain, known)
        return
    is_residual = known is residual.Residual
    layers = (
        layer
        for child, part in module._modules.items()
        for layer in _walk(part, f"{path}.{child}" if path else child, training, in_residual or is_residual)
    )
    if is_residual:
        yield Residual(module, name, list(layers))
    else:
        yield from layers


def _known_class(module: Any) -> type[nn.Module] | None:
    return next((cls for cls in type(module).__mro__ if cls in KINDS or cls in _CONTAINERS), None)


def _why_unknown(module: Any, known: type[nn.Module] | None, training: bool, in_residual: bool) -> str | None:
    """Why it is not known what a module computes, if it is not."""
    if known is None:
        names = ("Sequential", "Residual", *sorted({entry.plain.__name__ for entry in KINDS.values()}))
        return f"nothing is known about this kind of layer; known are {', '.join(names)}"
    parts = module.modules() if known in KINDS else (module,)
    reason = trusted.why_changed(module, known) or next(filter(None, map(trusted.why_hooked, parts)), None)
    if reason is None and known in KINDS:
        reason = KINDS[known].kind.why_not(module, training)
    if reason is None and in_residual and getattr(module, "inplace", False):
        reason = "it works in place, and changes the input that a Residual adds: use inplace=False"
    return reason
