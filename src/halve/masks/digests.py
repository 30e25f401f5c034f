"""Digests of all tensors of the model that masks were made for: parameters and buffers, also after a cast.

A tensor is digested in its own dtype and as its casts to narrower ones. Casting rounds the same way everywhere, so a
float16 copy of a float32 checkpoint is recognised bit for bit, although the digest of the original cannot be computed
from it. Channels are in the checkpoint's order.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from halve.errors import MaskError, listed
from halve.masks.fingerprint import Fingerprint, digest
from halve.modules import weight_name, weight_of, weight_sources

TensorDigests = Mapping[torch.dtype, str]  # SHA-256 by dtype: the tensor's own first, then its casts
_CASTS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Digests:
    """Digests of a model's tensors.

    Args:
        dense: By state-dict name. The weight of a masked layer stands under `LAYER.weight`, also where it is computed.
        masked: By layer, the digests of its weight with the mask applied.
        tied: State-dict names that share their tensor with another name, which has the digests.
    """

    dense: Mapping[str, TensorDigests]
    masked: Mapping[str, TensorDigests]
    tied: Mapping[str, str] = field(default_factory=dict)

    def only(self, layers: Collection[str]) -> "Digests":
        """The digests for masks of these layers alone; the others stay dense."""
        return replace(self, masked={name: known for name, known in self.masked.items() if name in layers})

    def first_name(self, name: str) -> str:
        """The name that has the digests of a tensor."""
        return self.tied.get(name, name)

    def check(self, fingerprints: Mapping[str, Fingerprint | None]) -> None:
        """Raise `MaskError` unless these are the digests for masks with these fingerprints, by layer."""
        if self.masked.keys() != fingerprints.keys():
            raise MaskError(f"the digests are for other layers: {listed(self.masked.keys() ^ fingerprints.keys())}")
        if self.tied.keys() & self.dense.keys() or not self.dense.keys() >= set(self.tied.values()):
            raise MaskError("a tied tensor must have no digest, and be tied to a tensor that has one")
        for layer, print_ in fingerprints.items():
            dense, masked = self.dense.get(self.first_name(weight_name(layer))), self.masked[layer]
            if dense is None or dense.keys() != masked.keys():
                raise MaskError(f"the digests do not fit the weight of layer {layer}")
            native = next(iter(dense))
            if print_ is not None and (print_.dense, print_.masked) != (dense[native], masked[native]):
                raise MaskError(f"the digests and the fingerprint of layer {layer} are of different weights")


def dtypes_of(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes in which a tensor of this dtype is digested: its own, and casts that are not wider.

    >>> dtypes_of(torch.float32)
    (torch.float32, torch.float16, torch.bfloat16)
    """
    if not dtype.is_floating_point:
        return (dtype,)
    return (dtype, *(cast for cast in _CASTS if cast != dtype and cast.itemsize <= dtype.itemsize))


def digests_of(tensor: Tensor, own: str | None = None) -> dict[torch.dtype, str]:
    """The digests of a tensor, by dtype. `own` is the one in its own dtype, if known."""
    plain = tensor.detach().cpu()
    dtype, *casts = dtypes_of(plain.dtype)
    return {dtype: own or digest(plain)} | {cast: digest(plain.to(cast)) for cast in casts}


def matching_dtype(tensor: Tensor, known: TensorDigests) -> torch.dtype | None:
    """The dtype whose digest the tensor's values match; None if they are others.

    A tensor may be stored in another dtype than its values need, such as float16 values that were loaded into a float32
    model. Integers must have their own dtype.

    >>> weight = torch.randn(8)
    >>> matching_dtype(weight.half().float(), digests_of(weight))
    torch.float16
    """
    if not has_digest(tensor):
        return None
    plain = tensor.detach().cpu()
    if next(iter(known)).is_floating_point != plain.is_floating_point():
        return None
    for dtype, expected in known.items():
        if dtype == plain.dtype:
            exact = plain
        elif not plain.is_floating_point() or not torch.equal((exact := plain.to(dtype)).to(plain.dtype), plain):
            continue
        if digest(exact) == expected:
            return dtype
    return None


def has_digest(tensor: Tensor) -> bool:
    """Whether a tensor's bytes say what it holds: not for sparse, quantized and meta tensors, and some subclasses."""
    kind = type(tensor)
    own = [cls for cls in kind.__mro__[: kind.__mro__.index(Tensor)] if cls is not nn.Parameter]
    plain = not any(hook in vars(cls) for cls in own for hook in ("__torch_function__", "__torch_dispatch__"))
    return plain and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def named_tensors(model: nn.Module, layers: Collection[str]) -> dict[str, Tensor]:
    """The model's parameters and buffers by state-dict name, detached.

    Buffers outside of the state dict are included: the model reads them too. The weights of `layers` are those that the
    layers multiply by, in place of what they are computed from. BatchNorm's counters of batches are left out.

    Args:
        model: The model.
        layers: The masked layers.
    """
    tensors = dict(_named(model))
    masked = {id(module): module for module in map(model.get_submodule, layers)}
    computed = {
        key: weight_of(module)
        for key, module in masked.items()
        if "weight" not in module._parameters and "weight" not in module._buffers
    }
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in computed:
            for source in weight_sources(module):
                tensors.pop(f"{name}.{source}".lstrip("."), None)
            tensors[weight_name(name)] = computed[id(module)]
    return tensors


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, registered in named:
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        if attribute == "num_batches_tracked" and isinstance(owner, _NormBase):
            continue
        own = vars(owner).get(attribute)  # if set, the module reads it in place of the registered tensor
        yield name, own if isinstance(own, Tensor) else registered


def ties_of(tensors: Mapping[str, Tensor], layers: Collection[str]) -> dict[str, str]:
    """Names whose tensor has another name, and that name: the one of a masked layer, or else the first."""
    masked = {weight_name(layer) for layer in layers}
    first: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name not in masked):
        first.setdefault(id(tensors[name]), name)
    return {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}
