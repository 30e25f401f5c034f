import torch

from halve.engine.kernels.kernel import Kernel, KernelFamily, Layout
from halve.engine.kernels.mma_sp.family import MmaSparse
from halve.engine.operations import Convolution, Linear

NHWC = torch.channels_last


def test_layouts_put_images_and_leave_other_tensors():
    images, rows = torch.randn(2, 8, 4, 4), torch.randn(2, 8)
    assert Layout.NHWC.of(images).is_contiguous(memory_format=NHWC)
    assert torch.equal(Layout.NHWC.of(images), images)
    assert Layout.ANY.of(images) is images
    assert Layout.NHWC.of(rows) is rows


def test_a_kernel_is_called_by_its_family_and_variant():
    assert str(Kernel("mma_sp", "64x64")) == "mma_sp 64x64"


class Plain(KernelFamily):
    name, version = "plain", "1"

    def unavailable(self, device, dtype):
        return None

    def variants(self, piece, device):
        return ["only"]

    def run(self, inputs, packed, operation, variant):
        return operation.reference(inputs, packed)


class Last(Plain):
    writes = Layout.NHWC


def test_what_a_family_makes_is_known_without_running_it():
    x = torch.randn(2, 8, 6, 6)
    weights = {"weight": torch.randn(4, 8, 3, 3), "bias": torch.randn(4)}
    convolution = Convolution(4, 8, (3, 3), padding=(1, 0))
    for family in (Plain(), Last()):
        made, ran = family.fake([x], weights, convolution), family.run([x], weights, convolution, "only")
        assert (made.shape, made.dtype) == (ran.shape, ran.dtype)
        assert made.is_contiguous(memory_format=NHWC) == isinstance(family, Last)


def test_weights_are_kept_as_they_are_unless_a_family_packs_them():
    family, tensors = Plain(), {"weight": torch.randn(4, 8)}
    packed = family.pack(None, tensors)
    assert packed == tensors
    assert packed is not tensors
    assert family.unpack(None, packed) == tensors


def test_rows_of_linear_layers_are_not_taken_for_images():
    """ConvNeXt's Linear layers get (N, H, W, C): channels last would copy everything, with another axis last."""
    x = torch.randn(2, 3, 5, 8)
    [given] = MmaSparse().laid_out([x], Linear(8, 8))
    assert given.data_ptr() == x.data_ptr()
    assert given.is_contiguous()
    packed = MmaSparse().pack(Linear(8, 8), {"weight": torch.zeros(8, 8)})
    assert MmaSparse().fake([x], packed, Linear(8, 8)).is_contiguous()
    assert MmaSparse().laid_out([x], Convolution(8, 3))[0].is_contiguous(memory_format=torch.channels_last)
