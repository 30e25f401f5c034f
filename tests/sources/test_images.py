import contextlib
import gzip
import io
import os
import socket
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from halve.errors import DataError
from halve.sources.data import load_data
from halve.sources.images import Picture, Pictures, find_pictures
from tests.pictures import class_folders, encoded, noise, tar_of


def pixels(image):
    return np.asarray(image)


def opened(where, transform=pixels):
    pictures, names = find_pictures(str(where))
    return Pictures(pictures, names, transform)


def truncated(path, size):
    path.write_bytes(path.read_bytes()[:size])
    return path


def test_each_subfolder_is_a_class_in_the_order_of_their_names(tmp_path):
    data = opened(class_folders(tmp_path / "d", ("dog", "cat", "Ape")))
    assert data.class_names == ["Ape", "cat", "dog"]
    assert [data[i][1] for i in range(len(data))] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert np.array_equal(data[8][0], pixels(noise(2)))  # dog/2.png was the third that was drawn


def test_pictures_deeper_inside_a_class_folder_belong_to_it(tmp_path):
    root = class_folders(tmp_path / "d")
    (root / "dog" / "puppies").mkdir()
    (root / "dog" / "puppies" / "x.png").write_bytes(encoded(9))
    pictures, names = find_pictures(str(root))
    assert names == ["cat", "dog"]
    assert sorted(p.label for p in pictures) == [0, 0, 0, 1, 1, 1, 1]


def test_a_folder_without_subfolders_gives_pictures_without_labels(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(encoded(i))
    data = opened(tmp_path)
    assert len(data) == 3
    assert data.class_names == []
    assert np.array_equal(data[1], pixels(noise(1)))


def test_files_that_are_no_pictures_are_passed_over(tmp_path):
    root = class_folders(tmp_path / "d")
    for name in ("README.md", "cat/notes.txt", "cat/.DS_Store", "dog/0.png.txt"):
        (root / name).write_text("words")
    assert len(opened(root)) == 6


def test_a_folder_whose_name_ends_like_a_picture_is_no_picture(tmp_path):
    root = class_folders(tmp_path / "d", ("cat", "dog.png"))
    data = opened(root)
    assert len(data) == 6
    assert all(data[i][0].shape == (8, 8, 3) for i in range(len(data)))


def test_class_folders_may_be_links(tmp_path):
    there = class_folders(tmp_path / "all", ("cat", "cow", "dog"))
    some = tmp_path / "some"
    some.mkdir()
    for name in ("cat", "dog"):
        os.symlink(there / name, some / name)
    data = opened(some)
    assert (len(data), data.class_names) == (6, ["cat", "dog"])


def test_stray_pictures_beside_class_folders_are_refused(tmp_path):
    root = class_folders(tmp_path / "d")
    (root / "stray.JPG").write_bytes(encoded(0, kind="JPEG"))
    with pytest.raises(DataError, match=r"images outside of them, such as stray\.JPG"):
        find_pictures(str(root))


def test_an_empty_class_folder_does_not_move_the_labels_of_the_others(tmp_path):
    root = class_folders(tmp_path / "d", ("ant", "cat", "dog"))
    for picture in (root / "ant").iterdir():
        picture.unlink()
    with contextlib.suppress(DataError):  # to refuse it is as good
        pictures, names = find_pictures(str(root))
        assert names == ["ant", "cat", "dog"]
        assert {p.label for p in pictures} == {1, 2}


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no images \(\.jpg"):
        find_pictures(str(tmp_path))


@pytest.mark.parametrize("where", ["nothing", "nothing.tar", "nothing-{00..01}.tar", "nothing-*.tar"])
def test_what_does_not_exist_is_named(tmp_path, where):
    with pytest.raises(DataError, match="no such folder or tar file"):
        find_pictures(str(tmp_path / where))


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_pictures_of_every_mode_become_rgb(tmp_path, mode):
    noise(3, mode=mode).save(tmp_path / ("x.tif" if mode == "CMYK" else "x.png"))
    result = opened(tmp_path)[0]
    assert result.shape == (8, 8, 3)
    assert np.array_equal(result, pixels(noise(3, mode=mode).convert("RGB")))


@pytest.mark.parametrize(
    ("name", "kind"), [("x.JPEG", "JPEG"), ("x.webp", "WEBP"), ("x.bmp", "BMP"), ("x.TIF", "TIFF")]
)
def test_endings_are_known_in_any_case(tmp_path, name, kind):
    (tmp_path / name).write_bytes(encoded(kind=kind))
    assert opened(tmp_path)[0].shape == (8, 8, 3)


@pytest.mark.parametrize("content", [b"", b"no picture", encoded()[:-30], encoded(kind="JPEG")[:200]])
def test_a_broken_picture_is_named(tmp_path, content):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(content)
    with pytest.raises(DataError, match=r"cat/broken\.png is not a readable image"):
        opened(tmp_path)[0]


def test_a_picture_that_vanished_is_named(tmp_path):
    data = opened(class_folders(tmp_path / "d"))
    (tmp_path / "d" / "cat" / "0.png").unlink()
    with pytest.raises(DataError, match=r"cat/0\.png"):
        data[0]


def test_a_huge_picture_is_refused(tmp_path, monkeypatch):
    (tmp_path / "bomb.png").write_bytes(encoded(size=(100, 100)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"bomb\.png"):
        opened(tmp_path)[0]


@pytest.mark.parametrize("failure", [TypeError, RuntimeError, AttributeError, ValueError, AssertionError])
def test_a_preprocessing_that_fails_is_not_blamed_on_the_picture(tmp_path, failure):
    (tmp_path / "x.png").write_bytes(encoded())

    def transform(_):
        raise failure("wants a tensor")

    with pytest.raises(DataError, match="wants a tensor") as raised:
        opened(tmp_path, transform)[0]
    assert "no readable picture" not in str(raised.value)


def test_class_folders_in_a_tar_are_classes_and_their_bytes_are_read_in_place(tmp_path):
    names = ["n02/b.JPEG", "n01/a.JPEG", "n01/c.JPEG"]
    members = {name: encoded(i, kind="JPEG") for i, name in enumerate(names)}
    data = opened(tar_of(tmp_path / "x.tar", {"n01/readme.txt": b"words", **members}))
    assert data.class_names == ["n01", "n02"]
    assert [data[i][1] for i in range(3)] == [1, 0, 0]
    for i in range(3):
        assert np.array_equal(data[i][0], pixels(Image.open(io.BytesIO(members[names[i]]))))


def test_a_leading_dot_in_a_tar_does_not_count(tmp_path):
    members = {"./n01/a.png": encoded(0), "./n02/a.png": encoded(1)}
    assert opened(tar_of(tmp_path / "x.tar", members)).class_names == ["n01", "n02"]


def test_a_flat_tar_gives_pictures_without_labels(tmp_path):
    data = opened(tar_of(tmp_path / "x.tar", {f"{i}.png": encoded(i) for i in range(2)}))
    assert data.class_names == []
    assert data[1].shape == (8, 8, 3)


def test_stray_pictures_beside_class_folders_in_a_tar_are_refused(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"cat/0.png": encoded(0), "stray.png": encoded(1)})
    with pytest.raises(DataError, match=r"stray\.png"):
        find_pictures(str(path))


def test_cls_members_are_labels(tmp_path):
    members = {"0001.jpg": encoded(0, kind="JPEG"), "0001.cls": b"7", "0002.cls": b"3\n", "0002.png": encoded(1)}
    data = opened(tar_of(tmp_path / "x.tar", members))
    assert [data[i][1] for i in range(2)] == [7, 3]
    assert data.class_names == []


def test_a_picture_without_cls_among_others_with_it_is_named(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"1.png": encoded(0), "1.cls": b"7", "2.png": encoded(1)})
    with pytest.raises(DataError, match=r"no \.cls label for 2\.png"):
        find_pictures(str(path))


def test_a_cls_member_that_is_no_number_is_refused(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"1.png": encoded(0), "1.cls": b"cat"})
    with pytest.raises(DataError, match=r"x\.tar"):
        find_pictures(str(path))


@pytest.fixture
def shards(tmp_path):
    for i in range(3):
        tar_of(tmp_path / f"s-{i:03}.tar", {f"n{i}/a.png": encoded(i), "n0/b.png": encoded(10 + i)})
    return tmp_path


@pytest.mark.parametrize("where", ["s-{000..002}.tar", "s-*.tar", "s-00[0-2].tar", "", "s-{0..0}0{0..2}.tar"])
def test_several_shards_are_one_data_set(shards, where):
    data = opened(shards / where)
    assert data.class_names == ["n0", "n1", "n2"]
    assert [data[i][1] for i in range(6)] == [0, 0, 1, 0, 2, 0]
    assert np.array_equal(data[5][0], pixels(noise(12)))


def test_many_shards_are_read_without_loading_them(tmp_path):
    """Opening reads the headers of a tar, and a batch reads its own pictures."""
    shards, each, size = 60, 4, 500_000
    content = encoded(0, (64, 64), kind="JPEG")
    content += bytes(size - len(content))  # what follows the end of a JPEG is ignored
    for shard in range(shards):
        tar_of(tmp_path / f"{shard:03}.tar", {f"{i}.jpg": content for i in range(each)})
    total = shards * each * size
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > total
    next(iter(load_data(str(tmp_path / "000.tar")).loader))  # imports what reading needs
    tracemalloc.start()
    try:
        data = load_data(str(tmp_path / f"{{000..{shards - 1:03}}}.tar"), batch_size=8, shuffle=True)
        _, opening = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        images = sum(len(batch) for batch in data.loader)
        _, reading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (data.images, images) == (shards * each, shards * each)
    assert opening < 0.02 * total
    assert reading < 0.1 * total


def test_a_range_takes_its_shards_only(shards):
    assert {p.path.name for p in find_pictures(str(shards / "s-{001..002}.tar"))[0]} == {"s-001.tar", "s-002.tar"}


def test_a_shard_that_a_range_names_and_that_is_missing_is_an_error(shards):
    (shards / "s-001.tar").unlink()
    with pytest.raises(DataError, match=r"s-001\.tar"):
        find_pictures(str(shards / "s-{000..002}.tar"))


def test_a_compressed_tar_is_refused(tmp_path):
    plain = tar_of(tmp_path / "x.tar", {"n01/a.png": encoded()})
    packed = tmp_path / "y.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(DataError, match=r"uncompressed \.tar"):
        find_pictures(str(packed))
    packed.rename(tmp_path / "z.tar")
    with pytest.raises(DataError, match=r"z\.tar is not a readable"):
        find_pictures(str(tmp_path / "z.tar"))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"folders or uncompressed \.tar"):
        find_pictures(str(tmp_path / "x.zip"))


@pytest.mark.parametrize("size", [0, 100, 700, 512 + 2 * 512 + 100])
def test_a_truncated_tar_is_refused(tmp_path, size):
    content = {f"n01/{i}.bmp": encoded(i, (16, 16), kind="BMP") for i in range(2)}
    path = truncated(tar_of(tmp_path / "x.tar", content), size)
    with pytest.raises(DataError, match=r"x\.tar"):
        find_pictures(str(path))


def test_a_tar_without_pictures_is_named(tmp_path):
    with pytest.raises(DataError, match=r"x\.tar has no images"):
        find_pictures(str(tar_of(tmp_path / "x.tar", {"a.txt": b"words"})))


def test_a_broken_picture_in_a_tar_is_named_with_its_member(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"n01/a.png": encoded(), "n01/b.png": b"no picture"})
    data = opened(path)
    assert data[0][1] == 0
    with pytest.raises(DataError, match=r"x\.tar:n01/b\.png is not a readable image"):
        data[1]


def test_a_picture_reads_its_own_bytes_only(tmp_path):
    (tmp_path / "x").write_bytes(b"0123456789")
    assert Picture(tmp_path / "x", None).read() == b"0123456789"
    assert Picture(tmp_path / "x", None, 2, 3).read() == b"234"


def test_a_link_that_leads_back_adds_no_pictures(tmp_path):
    folder = class_folders(tmp_path / "d")
    before, _ = find_pictures(str(folder))
    (tmp_path / "d" / "cat" / "loop").symlink_to("..", target_is_directory=True)
    after, _ = find_pictures(str(folder))
    assert len(after) == len(before)


RAMP = np.linspace(0, 1, 64).reshape(8, 8)


def saved(path, pixels, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("x.png", np.rint(RAMP * 65535).astype(np.uint16)),
        ("x.tif", np.rint(RAMP * 65535).astype(np.uint16)),
        ("x.tif", np.rint(RAMP * 65535).astype(np.int32)),
        ("x.tif", np.rint(RAMP * 2**31 - 2**30).astype(np.int32)),
        ("x.tif", RAMP.astype(np.float32)),
        ("x.tif", (RAMP * 1000 - 500).astype(np.float32)),
    ],
    ids=["png, 16 bits", "tiff, 16 bits", "tiff, 32 bits", "tiff, large", "tiff, 0 to 1", "tiff, other range"],
)
def test_deep_pictures_are_scaled_by_their_range(tmp_path, name, pixels):
    saved(tmp_path / name, pixels)
    found = opened(tmp_path)[0]
    assert found.shape == (8, 8, 3)
    assert np.abs(found[..., 0] - 255 * RAMP).max() <= 1


def test_a_dark_deep_picture_stays_dark(tmp_path):
    saved(tmp_path / "x.png", np.full((8, 8), 655, np.uint16))
    saved(tmp_path / "y.tif", np.full((8, 8), 0.01, np.float32))
    assert all((image <= 3).all() for image in opened(tmp_path))


def test_16_bit_colours_are_scaled(tmp_path):
    """Pillow reads them as 8 bits."""
    chunks = np.repeat(np.rint(RAMP * 65535).astype(">u2")[..., None], 3, 2)
    raw = b"".join(b"\0" + row.tobytes() for row in chunks)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(content)
    assert np.abs(opened(tmp_path)[0][..., 0] - 255 * RAMP).max() <= 1


def test_pixels_that_are_no_numbers_are_a_data_error(tmp_path):
    saved(tmp_path / "x.tif", np.full((8, 8), np.nan, np.float32))
    with pytest.raises(DataError, match=r"x\.tif is not a readable image: .*NaN"):
        opened(tmp_path)[0]


def test_what_macos_leaves_is_no_class_and_no_picture(tmp_path):
    root = class_folders(tmp_path / "d")
    (root / "__MACOSX" / "cat").mkdir(parents=True)
    for name in ("__MACOSX/cat/._0.png", "__MACOSX/cat/0.png", "cat/._0.png", "._x.png"):
        (root / name).write_bytes(b"resource fork")
    assert opened(root).class_names == ["cat", "dog"]
    assert len(opened(root)) == 6
    names = ("cat/0.png", "dog/0.png", "__MACOSX/cat/._0.png", "__MACOSX/cat/0.png", "cat/._0.png", ".cache/1.png")
    tar = tar_of(tmp_path / "x.tar", dict.fromkeys(names, encoded()))
    assert opened(tar).class_names == ["cat", "dog"]
    assert len(opened(tar)) == 2
    assert len(opened(tar_of(tmp_path / "y.tar", {"./cat/0.png": encoded()}))) == 1


def test_a_pipe_a_socket_and_a_device_are_no_pictures(tmp_path):
    root = class_folders(tmp_path / "d")
    os.mkfifo(root / "cat" / "pipe.png")
    (root / "cat" / "device.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(root / "cat"):
        server.bind("socket.png")
    assert len(opened(root)) == 6


def test_a_picture_that_became_a_pipe_does_not_block(tmp_path):
    data = opened(class_folders(tmp_path / "d"))
    data.pictures[0].path.unlink()
    os.mkfifo(data.pictures[0].path)
    with pytest.raises(DataError, match="not a regular file"):
        data[0]


def test_a_tar_that_is_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    for where in (tmp_path / "x.tar", tmp_path):
        with pytest.raises(DataError, match=r"x\.tar: images must be in folders or uncompressed \.tar files"):
            find_pictures(str(where))
