"""What callers pass. Types, shapes and devices are checked at once; what is in a tensor is checked where it lies, by
torch._assert_async: at once on the CPU, and on a GPU when it comes to it, without waiting for it."""

import numbers

import torch


def described(x):
    """For messages: a tensor's type and shape, or what it is in place of a tensor."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def positive(**sizes):
    for name, size in sizes.items():
        if isinstance(size, (bool, float)) or size < 1:
            raise ValueError(f"{name} is {size}; it must be a positive integer")


def integer(shape, **values):
    """shape: of which they may be tensors, for messages"""
    for name, x in values.items():
        if isinstance(x, bool) or not isinstance(x, (numbers.Integral, torch.SymInt)):
            raise ValueError(f"{name} is {x!r}; it must be an integer, or a tensor of them, {shape}")


def integers(shape, **tensors):
    """shape: what it says of that, for messages"""
    for name, x in tensors.items():
        dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bool
        if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            raise ValueError(f"{name} is {described(x)}; it must be integers, {shape}")


def in_range(x, most, name, range_of):
    torch._assert_async(((x >= 0) & (x <= most)).all(), f"{name} must lie in {range_of}")
