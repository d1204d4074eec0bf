"""Optional C kernels for float32 on a CPU; `pcdeq.kernels.binding` is the one way to them."""
