"""Power control and load coupling in a wireless network, standard interference mappings (Yates 1995), where the theory
of pcdeq comes from: tested, solved, and proved to be feasible or not: python examples/power_control.py
"""

import math

import torch
from torch import Tensor

import pcdeq

USERS, CELLS = 16, 4
DEMAND = 5e6  # bit/s, of a user
SOLVER = pcdeq.Anderson(tol=1e-12, max_steps=2000)


def network(seed: int = 3) -> Tensor:
    """Channel gains over the noise, (cells, users): users anywhere in 1 km², path loss and shadowing in dB."""
    generator = torch.Generator().manual_seed(seed)
    stations = torch.tensor([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
    distance = torch.cdist(stations, torch.rand(USERS, 2, generator=generator)).clamp(min=0.03)
    loss = 128.1 + 37.6 * distance.log10() + 8 * torch.randn(CELLS, USERS, generator=generator)
    return 10 ** ((-loss.double() + 174 + 30 - 70) / 10)  # noise: -174 dBm/Hz in 10 MHz


def uplink(gain: Tensor) -> pcdeq.ConcaveMap:
    """The powers p that give each user a target SINR at the station that is best for him, (samples, users).

    User i needs target · (Σ_{j≠i} G_bj p_j + 1) / G_bi at station b; far out the 1 does not count.
    """
    ratio = gain[:, None, :] / gain[:, :, None] * (1 - torch.eye(USERS))  # (cells, users, users)

    def interference(p: Tensor) -> Tensor:  # (samples, cells, users)
        return (ratio.reshape(-1, USERS) @ p.T).T.reshape(len(p), CELLS, USERS)

    return pcdeq.ConcaveMap(
        lambda p, target: target * (interference(p) + 1 / gain).amin(1),
        asymptotic=lambda p, target: target * interference(p).amin(1),
        solver=SOLVER,
    )


def load_coupling(gain: Tensor, power: float = 20.0, bandwidth: float = 50 * 180e3) -> pcdeq.ConcaveMap:
    """How busy the cells are, (samples, cells), for demands of the users (Siomina & Yuan 2012).

    User j is served at the rate B log2(1 + SINR_j), where other cells interfere as often as they are busy.
    """
    member = torch.nn.functional.one_hot(gain.argmax(0), CELLS).to(gain)  # (users, cells)
    signal = power * gain.amax(0)
    others, rate = power * gain.T * (1 - member), bandwidth / math.log(2)
    return pcdeq.ConcaveMap(
        lambda v, demand: (demand / (rate * (signal / (v @ others.T + 1)).log1p())) @ member,
        asymptotic=lambda v, demand: (demand / (rate * signal) * (v @ others.T)) @ member,
        solver=SOLVER,
    )


def main() -> None:
    gain = network()
    powers, loads, zero = uplink(gain), load_coupling(gain), torch.zeros(4, USERS).double()
    start, demand = torch.zeros(1, CELLS).double(), torch.full((1, USERS), DEMAND).double()
    passed = bool(powers.check(zero[:1], torch.ones(1, 1)) and loads.check(start, demand))
    radius = powers.exists(zero[:1], torch.ones(1, 1).double())
    low, high = (-10 * math.log10(float(bound)) for bound in (radius.upper, radius.lower))
    print(f"tests passed: {passed}; largest SINR for all: {low:.9f} to {high:.9f} dB, proved")
    targets = torch.tensor([[-12.0], [low - 1e-6], [high + 1e-6], [-4.0]], dtype=torch.float64)  # dB: a batch of four
    found = powers.exists(zero, 10 ** (targets / 10))
    for target, verdict, proved in zip(targets[:, 0].tolist(), found.verdict, found.proved.tolist(), strict=True):
        print(f"   target {target:.7f} dB: a solution {verdict}, proved: {proved}")
    box = powers.enclose(zero[:1], 10 ** (targets[:1] / 10), rtol=1e-12)
    print(f"   at -12 dB: {1e3 * box.lower.min():.3g} to {1e3 * box.upper.max():.3g} mW, proved: {bool(box.certified)}")
    most = DEMAND / 1e6 / float(loads.exists(start, demand).upper)
    v = loads(start, demand.requires_grad_())
    (gradient,) = torch.autograd.grad(v.sum(), demand)
    print(f"loads {[round(x, 6) for x in v[0].tolist()]}, finite below {most:.3f} Mbit/s a user")
    print(f"most costly is user {int(gradient.argmax())}: {1e6 * gradient.max():.6f} per Mbit/s")


if __name__ == "__main__":
    main()
