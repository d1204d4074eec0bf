"""Optional C kernels for float32 on a CPU; `pcdeq.kernels.binding` is the one way to them."""

# Names that the loop's old callers still import; with KERNELS None they run in plain torch.
KERNELS = None
PARALLEL_FROM = 32_768


def in_memory(x: object) -> bool:
    """Nothing is: there are no kernels for these callers any more."""
    return False


def threads(x: object) -> int:
    """One."""
    return 1


is_plain = is_native = in_memory
