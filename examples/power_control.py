"""Uplink power control and load coupling in a wireless network, where the theory of pcdeq comes from.

Powers and loads solve z = g(z) with a standard interference mapping g (Yates 1995). Here such maps, each
written in a line or two, are tested, solved, certified and differentiated: python examples/power_control.py
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import pcdeq
from pcdeq import theory

USERS, CELLS = 16, 4
PEAK = 0.2  # W, of a mobile
DEMAND = 5e6  # bit/s, of a user
SOLVER = pcdeq.Anderson(tol=1e-12)


def decibel(x: float) -> float:
    return 10 * math.log10(x)


def network(seed: int = 3) -> Tensor:
    """Channel gains over the noise, (cells, users): users anywhere in 1 km², path loss and shadowing in dB."""
    generator = torch.Generator().manual_seed(seed)
    stations = torch.tensor([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
    distance = torch.cdist(stations, torch.rand(USERS, 2, generator=generator)).clamp(min=0.03)
    loss = 128.1 + 37.6 * distance.log10() + 8 * torch.randn(CELLS, USERS, generator=generator)
    noise = -174 - 30 + decibel(10e6)  # dBW in 10 MHz
    return 10 ** ((-loss.double() - noise) / 10)


def uplink(gain: Tensor):
    """Maps of powers p for a target of 1: at each user's strongest station, and at the best station for these p.

    User i needs (Σ_{j≠i} G_bj p_j + 1) / G_bi at station b. The sum leaves j = i out instead of subtracting it,
    which would cancel digits; the clamp keeps what a solver proposes in the cone, outside which a minimum of
    affine functions need not have a fixed point.
    """
    strongest, everyone = gain.argmax(0), torch.arange(USERS)
    ratio = gain[:, None, :] / gain[:, :, None] * (1 - torch.eye(USERS))  # (cells, users, users)

    def needed(p: Tensor) -> Tensor:
        return ratio @ p.clamp(min=0) + 1 / gain

    def fixed(p: Tensor) -> Tensor:
        return needed(p)[strongest, everyone]

    def best(p: Tensor) -> Tensor:
        return needed(p).amin(0)

    return fixed, best, ratio[strongest, everyone]


def load_coupling(gain: Tensor, power: float = 20.0, bandwidth: float = 50 * 180e3):
    """The map of the cells' loads v for demands d, and the matrix of its asymptotic mapping.

    A cell serves user j at the rate B log2(1 + SINR_j), where other cells interfere as often as they are busy;
    its load is the share of its blocks that its users take together (Siomina & Yuan 2012).
    """
    serving, everyone = gain.argmax(0), torch.arange(USERS)
    signal = power * gain[serving, everyone]
    member = torch.nn.functional.one_hot(serving, CELLS).to(gain)  # (users, cells)
    others, rate = power * gain.T * (1 - member), bandwidth / math.log(2)

    def loads(v: Tensor, demand: Tensor) -> Tensor:
        sinr = signal / (others @ v + 1)
        return (demand / (rate * sinr.log1p())) @ member

    def far(demand: Tensor) -> Tensor:  # log(1 + x) ~ x for small x
        return member.T @ ((demand / (rate * signal))[:, None] * others)

    return loads, far


def show_uplink(gain: Tensor) -> None:
    fixed, best, matrix = uplink(gain)
    print("1. Uplink power control: the least powers that give every user its SINR")
    tests = (theory.check_positive, theory.check_monotone, theory.check_scalable, theory.check_concave)
    for name, fn in (("fixed station", fixed), ("best station", best)):
        verdicts = [check(fn, USERS) for check in tests]
        print(f"   {name}: {', '.join(v.name if v else f'not {v.name}' for v in verdicts)}")
    by_matrix = theory.spectral_radius(matrix)
    by_limit = theory.spectral_radius(theory.asymptotic_mapping(best), USERS)
    print(f"   largest SINR 1/ρ, fixed station: {-decibel(by_matrix.value):.3f} dB (Perron root)")
    print(f"   largest SINR 1/ρ, best station:  {-decibel(by_limit.value):.3f} dB (power iteration)")
    for target in (-12, -7, -6):
        show_target(target, best)


def show_target(target: float, best: Callable[[Tensor], Tensor]) -> None:
    def fn(p: Tensor) -> Tensor:
        return 10 ** (target / 10) * best(p)

    answer = theory.has_fixed_point(fn, USERS)
    print(f"   target {target} dB: a solution {answer.verdict}, ρ = {answer.radius.value:.6f}")
    if answer:
        p = pcdeq.fixed_point(fn, torch.zeros(USERS).double(), solver=SOLVER)
        box = theory.enclose_map(fn, p)
        print(f"      powers from {1e3 * p.min():.3g} to {1e3 * p.max():.3g} mW, proved to {error(box):.0e} (relative)")


def show_load(gain: Tensor) -> None:
    loads, far = load_coupling(gain)
    start, demand = torch.zeros(CELLS).double(), torch.full((USERS,), DEMAND).double()

    def fn(v: Tensor) -> Tensor:
        return loads(v, demand)

    print(f"2. Load coupling: how busy the cells are, for {DEMAND / 1e6:g} Mbit/s to every user")
    print(f"   {theory.check_concave(fn, CELLS)}")
    exact, limit = theory.spectral_radius(far(demand)), theory.spectral_radius(theory.asymptotic_mapping(fn), CELLS)
    print(f"   ρ of the asymptotic mapping: {exact.value:.9f} in closed form, {limit.value:.9f} as a limit")
    print(f"   so loads are finite below {DEMAND / 1e6 / exact.value:.2f} Mbit/s a user")
    variable = demand.clone().requires_grad_()
    for solver in (pcdeq.Picard(tol=1e-12), SOLVER):
        v = pcdeq.fixed_point(loads, start, variable, solver=solver)
        print(f"   {type(solver).__name__}: loads {[round(x, 6) for x in v.tolist()]}")
    order, scaling = theory.enclose_map(fn, v.detach()), theory.scaling_bounds(fn, v.detach())
    print(f"   proved to {error(order):.0e} by the order test, to {error(scaling):.0e} by scaling bounds (relative)")
    (gradient,) = torch.autograd.grad(v.sum(), variable)
    step = 100 * torch.eye(USERS).double()[0]
    up, down = (float(pcdeq.fixed_point(loads, start, demand + d, solver=SOLVER).sum()) for d in (step, -step))
    print(f"   total load per Mbit/s to user 0: {1e6 * gradient[0]:.8f}, by differences {1e6 * (up - down) / 200:.8f}")
    print(f"   most costly is user {int(gradient.argmax())}: {1e6 * gradient.max():.3f} per Mbit/s")


def show_fairness(gain: Tensor) -> None:
    _, best, _ = uplink(gain)
    pair = theory.conditional_eigenvector(best, USERS, norm=lambda p: p.max() / PEAK)
    width = decibel(pair.upper) - decibel(pair.lower)
    print(f"3. The largest SINR that all users can have at once, with at most {PEAK} W each:")
    print(f"   {-decibel(pair.value):.3f} dB, known to {width:.0e} dB")


def error(box: pcdeq.Enclosure) -> float:
    return float((box.width / box.lower).max()) if box.certified else math.inf


def main() -> None:
    for show in (show_uplink, show_load, show_fairness):
        show(network())


if __name__ == "__main__":
    main()
