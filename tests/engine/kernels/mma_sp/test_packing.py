import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.engine.kernels.mma_sp.packing import pack, pack_dense, unpack
from halve.errors import MaskError
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern
from tests.random_masks import random
from tests.untouched import same_bits

kernels = st.sampled_from([(), (1, 1), (3, 3), (2, 5)])
shapes = st.tuples(st.integers(1, 40), st.integers(1, 20).map(lambda n: 4 * n), kernels)
rules, dtypes = st.sampled_from(["2:4", "1:4", "1:2"]), st.sampled_from([torch.float16, torch.bfloat16])


def masked(rows, channels, kernel, seed, rule="2:4", dtype=torch.float16):
    weight = random(rows, channels, *kernel, seed=seed).to(dtype)
    layout = Layout("conv" if kernel else "linear", tuple(weight.shape), Pattern(rule).size)
    mask = Mask.from_scores(Pattern(rule), layout, random(*weight.shape, seed=seed + 1))
    return mask.apply_to(weight), mask.kept()


@given(shapes, st.integers(0, 99), rules, dtypes)
def test_packing_is_lossless(shape, seed, rule, dtype):
    weight, kept = masked(*shape, seed, rule, dtype)
    packed = pack(weight, kept)
    assert same_bits(unpack(packed), weight)
    assert packed.values.dtype == dtype
    assert packed.values.shape[2:] == (32, 8)
    assert packed.metadata.shape == (packed.values.shape[0], packed.values.shape[1] // 2, 32)


def test_values_and_metadata_are_where_the_instruction_reads_them():
    weight, kept = masked(20, 72, (3, 2), seed=5)
    packed = pack(weight, kept)
    for row, position, block in ((0, 0, 0), (7, 1, 3), (8, 5, 17), (15, 2, 9), (19, 3, 16)):
        columns = slice(4 * block, 4 * block + 4)
        flags = kept.flatten(2)[row, columns, position]
        places = flags.nonzero().flatten().tolist()
        k = position * 128 + 4 * block  # 72 channels are padded to 128
        tile, within = divmod(row, 16)
        half, g = divmod(within, 8)
        step, rest = divmod(k, 32)
        for which, place in enumerate(places):
            compressed = rest // 2 + which  # index among the 16 kept columns of this step
            side, inner = divmod(compressed, 8)
            lane, value = 4 * g + inner // 2, 4 * side + 2 * half + inner % 2
            assert packed.values[tile, step, lane, value] == weight.flatten(2)[row, 4 * block + place, position]
        wide, inside = divmod(k, 64)
        word = int(packed.metadata[tile, wide, 4 * g + inside // 16]) & 0xFFFFFFFF
        nibble = word >> (16 * half + inside % 16) & 15
        assert [nibble & 3, nibble >> 2] == places


def test_an_updated_weight_under_the_same_mask_has_the_same_metadata():
    weight, kept = masked(32, 64, (3, 3), seed=0)
    other = torch.where(kept, random(*weight.shape, seed=9).half(), torch.zeros((), dtype=torch.float16))
    assert torch.equal(pack(weight, kept).metadata, pack(other, kept).metadata)
    assert same_bits(unpack(pack(other, kept)), other)


def test_kept_weights_that_are_zero_keep_their_position():
    kept = torch.tensor([[True, False, False, True]])
    packed = pack(torch.zeros(1, 4, dtype=torch.float16), kept)
    assert int(packed.metadata[0, 0, 0]) & 15 == 0 | 3 << 2


def test_indices_of_a_block_always_ascend():
    weight, kept = masked(16, 64, (), seed=3, rule="1:4")
    words = pack(weight, kept).metadata.long() & 0xFFFFFFFF
    nibbles = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)])
    assert bool(((nibbles & 3) < (nibbles >> 2)).all())


def test_weights_that_are_not_2_4_raise():
    with pytest.raises(MaskError, match="must be 2:4"):
        pack(torch.ones(1, 4), torch.tensor([[True, True, True, False]]))
    with pytest.raises(MaskError, match="must have the same shape"):
        pack(torch.ones(1, 4), torch.ones(1, 8, dtype=torch.bool))


def test_dense_values_are_where_the_dense_instruction_reads_them():
    weight = random(20, 72, 3, 2).half()
    packed = pack_dense(weight)
    assert packed.shape == (2, 6 * 128 // 16, 32, 8)
    for row, position, channel in ((0, 0, 0), (9, 1, 13), (17, 5, 71), (7, 2, 40)):
        k = position * 128 + channel
        tile, within = divmod(row, 16)
        half, g = divmod(within, 8)
        step, column = divmod(k, 16)
        side, inner = divmod(column, 8)
        value = packed[tile, step, 4 * g + inner // 2, 4 * side + 2 * half + inner % 2]
        assert value == weight.flatten(2)[row, channel, position]
