"""2:4 convolutions and Linear layers on CPUs with AVX-512 or AVX2, as machine code that is emitted for each layer.

Two families share the emitter: `cpu_sp` multiplies only the kept weights, `cpu` all of them. `cpu` is the dense
baseline of the same kernel: it isolates the effect of sparsity, and can be the fastest kernel for layers that are not
2:4.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp import features, memory
from halve.engine.kernels.cpu_sp.chain import can_chain, run_chain
from halve.engine.kernels.cpu_sp.packing import Packed, pack, pack_dense, packed_shapes, unpack
from halve.engine.kernels.cpu_sp.pool import MAX_TAPS, max_pool
from halve.engine.kernels.cpu_sp.program import MAX_VALUES, Code, known_program, program_for
from halve.engine.kernels.cpu_sp.version import version
from halve.engine.kernels.cpu_sp.worker import LANES
from halve.engine.kernels.kernel import ChainDescription, KernelFamily, Layout, Piece
from halve.engine.kernels.planes import has_rows
from halve.engine.operations import Convolution, Linear, MaxPool, Operation, PooledConvolution, Tensors

_WIDTH = 4
_VECTORS = ("bias", "scale")  # of the output channels


class _OnPlanes(KernelFamily):
    device_type = chain = "cpu"
    reads = writes = Layout.PLANES

    @property
    def version(self) -> str:
        return version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return features.unavailable(device, dtype) or memory.unavailable()

    def runs(self, x: Tensor) -> bool:
        """Whether the machine code runs on an input."""
        return x.is_cpu and self.unavailable(x.device, x.dtype) is None

    def can_chain(self, operation: Operation, shape: Sequence[int]) -> bool:
        return can_chain(operation, shape)  # where there is no AVX-512, layers run one by one

    def run_chain(
        self, inputs: Sequence[Tensor], packed: Sequence[Tensor], chain: ChainDescription
    ) -> list[Tensor] | None:
        return run_chain(inputs, packed, chain) if all(x.numel() and _has_avx512(x) for x in inputs) else None


class _Cpu(_OnPlanes):
    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        instructions = features.instructions_for(piece.dtype)
        if not isinstance(operation, Convolution | Linear | PooledConvolution) or instructions is None:
            return ()
        if isinstance(operation, PooledConvolution) and instructions != features.AVX512:
            return ()
        convolution = operation.convolution
        if convolution.groups > 1 or (self.sparse and (convolution.channels % _WIDTH or not piece.is_2_4)):
            return ()
        values, _ = packed_shapes(convolution.weight_shape, self.sparse)
        return (instructions,) if math.prod(values) <= MAX_VALUES else ()

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        weight = tensors["weight"].reshape(_convolution(operation).weight_shape)
        values, codes = pack(weight) if self.sparse else pack_dense(weight)
        packed = {"values": values} if codes is None else {"values": values, "codes": codes}
        return {**packed, **{name: tensors[name] for name in _VECTORS if name in tensors}}

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        weight = unpack(Packed(packed["values"], packed.get("codes")), _convolution(operation).weight_shape)
        weight = weight.flatten(1) if isinstance(operation, Linear) else weight
        return {"weight": weight, **{name: packed[name] for name in _VECTORS if name in packed}}

    def laid_out(self, inputs: Sequence[Tensor], operation: Operation) -> list[Tensor]:
        x, *residual = inputs
        if _convolution(operation).stride != (1, 1) and has_rows(x):  # it is split into planes anyway
            return [x, *super().laid_out(residual, operation)]
        return super().laid_out(inputs, operation)

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        """Dense layers on less than a vector of pixels would mostly wait for code, which is larger than the weights."""
        return self.sparse or operation.size(inputs[0]) >= LANES

    def emitted(self, packed: Tensors, operation: Operation, variant: str) -> Code | None:
        pooled = isinstance(operation, PooledConvolution)
        if not self.runs(packed["values"]) or (pooled and not _has_avx512(packed["values"])):
            return None
        layer = operation.convolution if isinstance(operation, PooledConvolution) else operation
        assert isinstance(layer, Convolution | Linear)
        return program_for(layer, *_weights(packed), _instructions(packed["values"].dtype, variant)).code

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
        if isinstance(operation, PooledConvolution) and x.numel() and _has_avx512(x):
            return max_pool(self.run(inputs, packed, operation.convolution, variant), operation.pool)
        given = _weights(packed)
        if x.is_cpu and x.numel():
            known = known_program(operation, *given, variant)  # type: ignore[arg-type]
            if known is not None:
                return known.run(x, residual)
        if not x.numel():
            return self.fake(inputs, packed, operation)
        if not self.runs(x) or not isinstance(operation, Convolution | Linear):
            y = operation.reference(inputs, self.unpack(operation, packed))
            return self.writes.of(y, operation.channel_dim)
        return program_for(operation, *given, _instructions(x.dtype, variant)).run(x, residual)


class CpuSparse(_Cpu):
    name = "cpu_sp"
    sparse = True


class CpuDense(_Cpu):
    name = "cpu"


class CpuPool(_OnPlanes):
    """Max pooling between layers on planes."""

    name = "cpu_pool"

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, MaxPool) or features.arithmetic_for(piece.dtype, features.AVX512) is None:
            return ()
        return (features.AVX512,) if operation.kernel[0] * operation.kernel[1] <= MAX_TAPS else ()

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        [x] = inputs
        assert isinstance(operation, MaxPool)
        if not x.numel() or not _has_avx512(x):
            return operation.reference(inputs, packed)
        return max_pool(x, operation)


def _has_avx512(x: Tensor) -> bool:
    return x.is_cpu and features.arithmetic_for(x.dtype, features.AVX512) is not None and memory.unavailable() is None


def _weights(packed: Tensors) -> tuple[Packed, Tensor | None, Tensor | None]:
    return Packed(packed["values"], packed.get("codes")), packed.get("bias"), packed.get("scale")


def _instructions(dtype: torch.dtype, variant: str) -> str:
    """The instruction set of a variant, or the best one here if the plan is of another machine."""
    here = features.arithmetic_for(dtype, variant) is not None
    return variant if here else features.instructions_for(dtype) or variant


def _convolution(operation: Operation) -> Convolution:
    assert isinstance(operation, Convolution | Linear | PooledConvolution)
    return operation.convolution
