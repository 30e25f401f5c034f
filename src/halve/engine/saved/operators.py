"""The operators that a file with a compiled network may name. Everything else in a file is data.

An operator of PyTorch's `aten` library is on the list if it only computes new values from its arguments: it writes to
no argument and no file, and checks sizes and indices before it reads memory. Where PyTorch does not check, the function
that does is found in its place. Overloads that write to an argument are never found, whatever their name.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from halve.engine.saved.trusting import CHECKED, TRUSTING

_TENSORS = {
    "arithmetic": """
        abs absolute add addcdiv addcmul ceil clamp clamp_max clamp_min clip copysign div divide fix float_power
        floor floor_divide fmax fmin fmod frac hypot lerp maximum minimum mul multiply nan_to_num neg negative
        positive pow reciprocal remainder round rsqrt rsub sgn sign signbit sqrt square sub subtract true_divide
        trunc
    """,
    "functions of each value": """
        acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh cos cosh
        deg2rad digamma erf erfc erfinv exp exp2 expm1 i0 lgamma log log10 log1p log2 logaddexp logaddexp2 logit
        rad2deg sigmoid sin sinc sinh special_entr special_erf special_erfc special_erfinv special_exp2
        special_expit special_expm1 special_gammaln special_log1p special_log_softmax special_logit
        special_logsumexp special_ndtr special_ndtri special_round special_sinc special_softmax special_xlog1py
        special_xlogy tan tanh xlogy
    """,
    "activations": """
        celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid _log_softmax log_softmax
        mish prelu relu relu6 rrelu _safe_softmax selu silu softmax _softmax softplus softshrink threshold
    """,
    "comparisons and logic": """
        all any bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor eq ge greater
        greater_equal gt heaviside isclose isfinite isin isinf isnan isneginf isposinf le less less_equal
        logical_and logical_not logical_or logical_xor lt masked_fill ne not_equal where
    """,
    "reductions": """
        amax amin aminmax argmax argmin count_nonzero cummax cummin cumprod cumsum diff dist kthvalue logcumsumexp
        logsumexp max mean median min mode nanmean nanmedian nanquantile nansum norm prod quantile std std_mean sum
        trace var var_mean
    """,
    "shapes": """
        adjoint alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat channel_shuffle
        chunk column_stack concat concatenate constant_pad_nd diag diag_embed diagflat diagonal dstack expand
        expand_as flatten flip fliplr flipud hstack mH mT matrix_H meshgrid moveaxis movedim narrow
        native_channel_shuffle numpy_T pad _pad_circular _pad_enum permute pixel_shuffle pixel_unshuffle ravel
        reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
        replication_pad2d replication_pad3d reshape reshape_as roll rot90 row_stack split split_with_sizes squeeze
        stack swapaxes swapdims t tensor_split tile transpose tril triu unbind unflatten unfold unsqueeze vstack
    """,
    "indices": """
        argsort argwhere bucketize diagonal_scatter embedding gather index index_add index_copy index_fill index_put
        index_reduce index_select masked_scatter masked_select msort nonzero nonzero_numpy one_hot scatter
        scatter_add scatter_reduce select select_scatter slice slice_scatter sort take take_along_dim topk
        tril_indices triu_indices
    """,
    "copies and new tensors": """
        arange clone complex conj conj_physical detach eye fill full full_like imag lift_fresh_copy linspace
        logspace new_full new_ones new_zeros ones ones_like polar real resolve_conj resolve_neg scalar_tensor
        _to_copy to.device to.dtype to.dtype_layout to.other type_as view_as_complex view_as_real zero zeros
        zeros_like
    """,
    "random numbers": """
        alpha_dropout bernoulli dropout feature_alpha_dropout feature_dropout native_dropout rand rand_like randint
        randint_like randn randn_like randperm
    """,
    "layers": """
        adaptive_avg_pool1d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d
        avg_pool3d batch_norm bilinear col2im conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution _convolution cosine_similarity grid_sampler grid_sampler_2d grid_sampler_3d
        group_norm gru.input im2col instance_norm layer_norm linear lstm.input max_pool1d max_pool1d_with_indices
        max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d
        _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training native_group_norm native_layer_norm
        pairwise_distance rms_norm rnn_relu.input rnn_tanh.input scaled_dot_product_attention upsample_bicubic2d
        _upsample_bicubic2d_aa.vec upsample_bilinear2d _upsample_bilinear2d_aa.vec upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_trilinear3d _weight_norm
    """,
    "linear algebra and Fourier transforms": """
        addbmm addmm addmv addr baddbmm bmm cdist chain_matmul cross det dot einsum fft_fft fft_fft2 fft_fftfreq
        fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn ger inner inverse kron linalg_cross linalg_det
        linalg_diagonal linalg_inv linalg_inv_ex linalg_matmul linalg_matrix_norm linalg_multi_dot linalg_norm
        linalg_solve linalg_vecdot linalg_vector_norm matmul mm mv outer tensordot vdot
    """,
}
_SIZES = "_assert_scalar item _local_scalar_dense sym_constrain_range sym_constrain_range_for_size sym_numel sym_size"
_NAMES = frozenset(name for group in _TENSORS.values() for name in group.split())  # an operator, or one overload of it

_FUNCTIONS: dict[str, Callable[..., Any]] = {  # arithmetic on sizes
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "abs add and_ eq floordiv ge getitem gt le lt mod mul ne neg not_ or_ pos pow sub truediv"),
        (torch, "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum"),
        (math, "ceil floor trunc"),
    )
    for name in names.split()
}
_KINDS: dict[str, Any] = {  # of arguments that are not numbers, texts or tensors
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
    "Generator": (),  # only None
}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def name_of(target: Any) -> str:
    """The name of an operator in files. Raises `ValueError` if it is not on the list.

    >>> name_of(torch.ops.aten.add.Tensor), name_of(operator.mul)
    ('aten.add.Tensor', 'operator.mul')
    """
    name = _FUNCTION_NAMES.get(target) or str(TRUSTING.get(target, target))
    if operator_named(name) is not CHECKED.get(target, target):
        raise ValueError(f"another operator is called {name}")
    return name


@functools.lru_cache(4096)
def operator_named(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises `ValueError` if it is not on the list, or if this PyTorch does not have it.

    >>> operator_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    >>> operator_named("aten.relu_.default")
    Traceback (most recent call last):
    ValueError: 'aten.relu_.default' is not an operator that files may contain
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    library, _, overload = name.partition(".")
    packet_name, _, overload_name = overload.partition(".")
    if library != "aten" or not {packet_name, overload} & (_NAMES | frozenset(_SIZES.split())):
        raise ValueError(f"{name[:80]!r} is not an operator that files may contain")
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None or overload_name not in packet.overloads():
        raise ValueError(
            f"PyTorch {torch.__version__} has no operator {name[:80]!r}: use the version it was saved with"
        )
    found: OpOverload = getattr(packet, overload_name)
    if not _computes_only(found):
        raise ValueError(f"{name[:80]!r} is not an operator that files may contain")
    return CHECKED.get(found, found)


def schema_of(target: Callable[..., Any]) -> Any:
    """The schema of an operator; None for a function of Python's."""
    return getattr(TRUSTING.get(target, target), "_schema", None)


def _computes_only(found: OpOverload) -> bool:
    """Whether an overload writes to no argument and returns tensors, or belongs to `_SIZES`."""
    schema = found._schema
    if schema.is_mutable or any(argument.is_out for argument in schema.arguments):
        return False
    if schema.name.removeprefix("aten::") in _SIZES.split():
        return True
    return bool(schema.returns) and all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns)


def check_arguments(target: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise `ValueError` if an operator does not take so many arguments, or none of these names.

    PyTorch checks their types when it is called, except for those that are integers inside: an integer that is not a
    valid dtype ends the process.
    """
    schema = schema_of(target)
    if schema is None:
        if named:
            raise ValueError("arguments of a function must be positional")
        return
    known = schema.arguments
    positional = [argument.name for argument in known if not argument.kwarg_only]
    given = {*positional[: len(args)], *named}
    if len(args) > len(positional) or len(given) < len(args) + len(named):
        raise ValueError(f"too many arguments, or one twice: at most {len(known)}")
    if unknown := named.keys() - {argument.name for argument in known}:
        raise ValueError(f"unknown arguments {sorted(unknown)}")
    if missing := [a.name for a in known if not a.has_default_value() and a.name not in given]:
        raise ValueError(f"missing arguments {missing}")
    for argument, value in [*zip(known, args, strict=False), *((a, named[a.name]) for a in known if a.name in named)]:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if value is not None and not isinstance(value, _KINDS.get(kind, object)):
            raise ValueError(f"{argument.name} must be a {kind}")
