"""Optimisers by name, and the learning rate as a function of progress."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcdeq.errors import UsageError
from pcdeq.recipes import ResolvedConfig

WARM_UP = 0.2  # part of a one-cycle run in which the rate rises
START = 1 / 25  # of the peak rate, where it begins
TIGHT = 0.8  # part of a run after which solves are as fine as their tolerance says

# They need a closure or sparse gradients, which this trainer does not have.
_UNSUITABLE = {"Optimizer", "LBFGS", "SparseAdam"}


def make_optimizer(config: ResolvedConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """The optimiser that the configuration names, over all parameters of the model.

    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig(optimizer="sgd", optimizer_options={"momentum": 0.9}).resolve()
    >>> type(make_optimizer(config, nn.Linear(2, 2), torch.device("cpu"))).__name__
    'SGD'
    """
    kind = _find_optimizer(config.optimizer)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": config.lr, **config.optimizer_options}
    if "fused" in accepted and "foreach" not in options and device.type in ("cpu", "cuda"):
        options.setdefault("fused", True)
    if "weight_decay" in accepted:
        options.setdefault("weight_decay", config.weight_decay)
    elif config.weight_decay:
        raise UsageError(f"{kind.__name__} has no weight decay: set weight_decay to 0")
    for name, value in options.items():
        if name not in accepted:
            raise UsageError(f"{kind.__name__} has no option {name!r}, but {', '.join(list(accepted)[1:])}")
        if isinstance(accepted[name].default, bool):
            options[name] = bool(value)  # the command line knows only numbers
    try:
        return kind(_groups(model, config.scale_rate), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{kind.__name__} does not take these parameters or options: {error}") from error


def _groups(model: nn.Module, scale_rate: float) -> list[dict[str, Any]]:
    """All parameters of the model; apart, if these learn at another rate, the scales of weights that are normalised."""
    if scale_rate == 1.0:
        return [{"params": list(model.parameters())}]
    named = list(model.named_parameters())
    scales = [parameter for name, parameter in named if name.endswith(".weight_g")]
    others = [parameter for name, parameter in named if not name.endswith(".weight_g")]
    return [{"params": others}, {"params": scales, "part": scale_rate}]


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Learn at this rate from now on, or, where a group of parameters has a part of it, at that part."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("part", 1.0)


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimiser its saved state, in memory in the order of its parameters.

    A checkpoint may have another order, and torch's fused steps on a CPU go through memory without looking.
    """
    optimizer.load_state_dict(saved)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _find_optimizer(name: str) -> type[Optimizer]:
    known = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind.__name__ not in _UNSUITABLE
    }
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[near[0]].__name__}?" if near else "there are"
        raise UsageError(
            f"unknown optimizer {name!r}; {hint} ({', '.join(sorted(k.__name__ for k in known.values()))})"
        )
    return known[name.lower()]


def learning_rate(config: ResolvedConfig, epochs_done: float) -> float:
    """The rate after so many epochs, fractions included; a pure function, so a resumed run agrees.

    ``step`` is the paper's: one drop, after epoch ``lr_step``. ``one-cycle`` rises to ``lr`` along half a
    cosine and falls to 0 along another (Smith & Topin 2018).

    >>> from pcdeq.recipes import TrainConfig
    >>> paper = TrainConfig("pcdeq-1-l-tanh").resolve()
    >>> [round(learning_rate(paper, done), 6) for done in (0, 29.99, 30, 39)]
    [0.001, 0.001, 0.0001, 0.0001]
    """
    if config.schedule == "step":
        dropped = config.lr_step is not None and epochs_done >= config.lr_step
        return config.lr * (config.lr_factor or 1.0) if dropped else config.lr
    if config.schedule == "one-cycle":
        progress = epochs_done / config.epochs
        if progress < WARM_UP:
            return config.lr * (START + (1 - START) * _half_cosine(progress / WARM_UP))
        return config.lr * _half_cosine((1 - progress) / (1 - WARM_UP))
    return config.lr


def looseness(config: ResolvedConfig, epochs_done: float) -> float:
    """How many times its tolerance a solve may miss after so many epochs; a pure function, too.

    Early in training gradients are so rough that a rough equilibrium will do. From ``loosen`` it falls, by the same
    factor in the same time, to 1, and stays there for the last part.

    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=10, loosen=100.0).resolve()
    >>> [round(looseness(config, done), 3) for done in (0, 4, 8, 9.5)]
    [100.0, 10.0, 1.0, 1.0]
    """
    return config.loosen ** max(0.0, 1 - epochs_done / (TIGHT * config.epochs))


def _half_cosine(x: float) -> float:
    """From 0 at 0 to 1 at 1, flat at both ends."""
    return (1 - math.cos(math.pi * x)) / 2
