"""Networks: the paper's three topologies and one of ours, by row name, with the authors' weights if you have them."""

from pcdeq.models.clip import Clip
from pcdeq.models.frozen import freeze
from pcdeq.models.networks import MC, SC, TC, L, Network, Preprocessing, equilibrium_layers, pcdeq_layers
from pcdeq.models.reference import load_reference
from pcdeq.models.registry import build
from pcdeq.models.store import load, pretrained_names

__all__ = [
    "MC",
    "SC",
    "TC",
    "Clip",
    "L",
    "Network",
    "Preprocessing",
    "build",
    "equilibrium_layers",
    "freeze",
    "load",
    "load_reference",
    "pcdeq_layers",
    "pretrained_names",
]
