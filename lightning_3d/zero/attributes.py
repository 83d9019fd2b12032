"""Attributes on tensors of users: their own, which go along when others take the place of the tensors, and ours."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_3d.torch_internals.tensors import IS_PARAMETER

OWN_PREFIX = "_3d_"
"""Begins the names of ours."""


def users_attributes(tensor: Tensor) -> dict[str, object]:
    """The attributes that users set on a tensor."""
    return {
        name: value for name, value in vars(tensor).items() if not name.startswith(OWN_PREFIX) and name != IS_PARAMETER
    }


def successor(tensor: Tensor, value: Tensor) -> Tensor:
    """A value to take the place of a tensor: a parameter if that is one, with the attributes that users set on it."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(value).update(users_attributes(tensor))
    return value
