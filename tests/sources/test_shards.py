import itertools
import json
import random
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch

import halve
from halve.errors import DataError, LearningWarning, OptionError
from halve.learn.held_back import hold_back
from halve.learn.run_state import FORMAT
from halve.learn.stream import BatchStream
from halve.masks import storage
from halve.sources import shards as module
from halve.sources.data import load_data
from halve.sources.shards import Shards, read_shard, shuffled
from tests.learn.test_distributed import torchrun
from tests.pictures import encoded, tar_of
from tests.tiny import convnet, interrupting

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than a small machine has


def shard(path, numbers, kind="PNG"):
    """A shard whose labels tell its images apart."""
    members = {}
    for i in numbers:
        members |= {f"{i:06}.{kind.lower()}": encoded(i, kind=kind), f"{i:06}.cls": b"%d" % i}
    return tar_of(path, members)


def write_shards(folder, count=4, each=10):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        shard(folder / f"train-{i:06}.tar", range(i * each, (i + 1) * each))
    return str(folder / f"train-{{000000..{count - 1:06}}}.tar")


@pytest.fixture
def where(tmp_path):
    """Four shards of ten images each."""
    return write_shards(tmp_path / "shards")


def four_channels(image):
    """What the small network of these tests takes."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    return torch.cat([pixels, pixels.mean(0, keepdim=True)])


def labels(batches):
    return [label for _, labels in batches for label in labels.tolist()]


def streamed(where, **options):
    return load_data(str(where), **{"stream": True, "batch_size": 4} | options).loader


def error_of(where, **options):
    """What iterating raises; it keeps no traceback, and so no worker process, alive."""
    try:
        list(streamed(where, **options))
    except DataError as error:
        return str(error)
    return ""


def test_a_stream_gives_what_a_list_of_the_images_gives(where):
    one, other = list(streamed(where)), list(load_data(where, batch_size=4).loader)
    assert len(one) == len(other) == 10
    for (images, mine), (pictures, theirs) in zip(one, other, strict=True):
        assert torch.equal(images, pictures)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["", "train-*.tar", "train-{000000..000003}.tar", "train-00000[0-3].tar"])
def test_shards_are_named_by_a_folder_a_glob_or_a_range(where, tmp_path, name):
    assert labels(streamed(tmp_path / "shards" / name)) == list(range(40))


def test_a_stream_does_not_say_how_many_images_there_are(where):
    data = load_data(where, stream=True)
    assert data.images is None
    with pytest.raises(TypeError):
        len(data.loader)


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_worker_processes_share_the_shards(where, workers):
    found = labels(streamed(where, workers=workers))
    assert found != list(range(40)) or workers == 1
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffling_depends_on_seed_and_pass_alone(where, workers):
    def passes(seed):
        data = streamed(where, shuffle=True, seed=seed, workers=workers)
        return [labels(data) for _ in range(3)]

    torch.manual_seed(1)
    one = passes(0)
    state = torch.get_rng_state()
    random.seed(2)
    assert passes(0) == one
    assert torch.equal(torch.get_rng_state(), state)
    assert all(sorted(found) == list(range(40)) for found in one)
    assert len({tuple(found) for found in [*one, *passes(1), list(range(40))]}) == 7


def test_a_pass_that_was_not_read_to_its_end_counts(where):
    one, other = (streamed(where, shuffle=True, seed=3) for _ in range(2))
    next(iter(one))
    list(other)
    assert labels(one) == labels(other)


def test_the_buffer_mixes_the_images_of_several_shards(where, monkeypatch):
    def runs(found):
        return sum(a // 10 != b // 10 for a, b in itertools.pairwise(found))

    assert runs(labels(streamed(where, shuffle=True))) > 3
    monkeypatch.setattr(module, "BUFFER_IMAGES", 1)
    found = labels(streamed(where, shuffle=True))
    assert sorted(found) == list(range(40))
    assert runs(found) < 10


@pytest.mark.parametrize(("images", "size"), [(5, 2**20), (1000, 50)])
def test_the_buffer_is_limited_in_images_and_bytes(monkeypatch, images, size):
    monkeypatch.setattr(module, "BUFFER_IMAGES", images)
    monkeypatch.setattr(module, "BUFFER_BYTES", size)
    waiting, most = 0, 0

    def samples():
        nonlocal waiting, most
        for i in range(100):
            waiting += 1
            most = max(most, waiting)
            yield i, bytes(10)

    found = []
    for sample, _ in shuffled(samples(), random.Random(0)):
        waiting -= 1
        found.append(sample)
    assert most == 6
    assert found != sorted(found)
    assert sorted(found) == list(range(100))


def test_an_image_larger_than_the_buffer_passes(monkeypatch):
    monkeypatch.setattr(module, "BUFFER_BYTES", 50)
    samples = [(0, bytes(100)), (1, bytes(10)), (2, bytes(100))]
    assert sorted(shuffled(iter(samples), random.Random(0))) == samples


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_limit_takes_the_same_images_in_each_pass_from_few_shards(where, workers, shuffle):
    data = streamed(where, limit=8, shuffle=shuffle, workers=workers)
    one, other = labels(data), labels(data)
    assert len(one) == 8
    assert sorted(one) == sorted(other)
    assert len({i // 10 for i in one}) == max(1, workers)


def test_a_limit_chooses_shards_by_seed(where):
    assert len({labels(streamed(where, limit=1, seed=seed))[0] for seed in range(20)}) == 4
    assert sorted(labels(streamed(where, limit=100))) == list(range(40))


def test_lists_of_images_of_any_sizes(tmp_path):
    tar_of(tmp_path / "x.tar", {"0.png": encoded(0), "1.png": encoded(1, (9, 8)), "2.png": encoded(2)})
    (batch,) = streamed(tmp_path / "x.tar", lists=True)
    assert [tuple(image.shape) for image in batch] == [(3, 8, 8), (3, 8, 9), (3, 8, 8)]
    assert "different sizes: (3, 8, 8), (3, 8, 9)" in error_of(tmp_path / "x.tar")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("stream", [False, True])
def test_labels_are_read_from_cls_and_json(tmp_path, kind, stream):
    ending = kind.lower()
    members = {
        f"a/1.{ending}": encoded(1, kind=kind),
        "a/1.cls": b"7\n",
        "a/1.json": b'{"label": 5}',
        "a/2.json": json.dumps({"label": 3, "width": 8}).encode(),
        f"a/2.{ending}": encoded(2, kind=kind),
        f"b/2.left.{ending.upper()}": encoded(3, kind=kind),
        f"b/2.right.{ending}": encoded(4, kind=kind),
        "b/2.cls": b"9",
        "b/2.txt": b"words",
    }
    tar_of(tmp_path / "x.tar", members)
    data = load_data(str(tmp_path / "x.tar"), stream=stream)
    assert labels(data.loader) == [7, 3, 9, 9]


@pytest.mark.parametrize(
    "content", [b"{}", b"[7]", b'{"label": "cat"}', b'{"label": true}', b"{", b"\xff", b"[" * 10**5]
)
@pytest.mark.parametrize("stream", [False, True])
def test_json_without_an_integer_label_is_no_label(tmp_path, content, stream):
    tar_of(tmp_path / "x.tar", {"1.png": encoded(0), "1.json": content})
    (batch,) = load_data(str(tmp_path / "x.tar"), stream=stream).loader
    assert batch.shape == (1, 3, 8, 8)


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        folder = tarfile.TarInfo("cat.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        for name in ("__MACOSX/1.png", "._1.png", "1.png"):
            (tmp_path / "picture").write_bytes(encoded(0) if name == "1.png" else b"resource fork")
            tar.add(tmp_path / "picture", name)
    assert [picture.name for picture, _ in read_shard(tmp_path / "x.tar")] == ["1.png"]


# Faults


@pytest.mark.parametrize("name", ["nothing.tar", "train-{000000..000004}.tar", "nothing-*.tar"])
def test_a_shard_that_does_not_exist_is_named(where, tmp_path, name):
    with pytest.raises(DataError, match=r"no such folder or tar file") as raised:
        streamed(tmp_path / "shards" / name)
    assert "train-000004.tar" in str(raised.value) or "nothing" in str(raised.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_vanished_is_named(where, tmp_path, workers):
    data = load_data(where, stream=True, workers=workers).loader
    (tmp_path / "shards" / "train-000002.tar").unlink()
    try:
        list(data)
    except DataError as error:
        message = str(error)
    assert "train-000002.tar is not a readable WebDataset tar" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("what", ["digits", "letters:train", "photos"])
def test_data_without_shards_is_refused(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.png").write_bytes(encoded())
    with pytest.raises(DataError, match=f"--stream reads tars, .*; {what} has none"):
        streamed(what)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"loader": "dali"}, "--loader dali cannot be combined with --stream"), ({"classes_file": "x"}, "--classes")],
)
def test_options_that_a_stream_does_not_have_are_refused(where, options, says):
    with pytest.raises(OptionError, match=says):
        streamed(where, **options)


def end_of(path, member):
    """Where a member's content ends."""
    with tarfile.open(path) as tar:
        found = tar.getmember(member)
        return found.offset_data + found.size


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (-5, "is truncated or damaged at 000012.bmp"),  # inside of the image
        (None, "is truncated or damaged after 000012.bmp"),  # between two files
        (100, "is truncated or damaged after 000012.bmp"),  # inside of a header
    ],
)
def test_a_truncated_shard_is_named_with_the_member(tmp_path, cut, says, workers):
    shard(tmp_path / "0.tar", range(10))
    path = shard(tmp_path / "1.tar", range(10, 15), "BMP")
    end = end_of(path, "000012.bmp")
    whole = -(-end // 512) * 512
    path.write_bytes(path.read_bytes()[: whole if cut is None else end + cut if cut < 0 else whole + cut])
    message = error_of(tmp_path, workers=workers)
    assert f"1.tar {says}: copy it again" in message
    assert "Traceback" not in message


def test_a_skipped_file_that_is_truncated_is_noticed(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"1.png": encoded(0), "2.txt": bytes(5000)})
    path.write_bytes(path.read_bytes()[: end_of(path, "2.txt") - 2000])
    assert "x.tar, after 2.txt, is not a readable WebDataset tar: unexpected end of data" in error_of(path)


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    path = tar_of(tmp_path / "x.tar", {f"{i}.png": encoded(i) for i in range(3)})
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmember("1.png").offset
    content[at + 148 : at + 156] = b"99999999"  # the checksum
    path.write_bytes(content)
    assert "x.tar is truncated or damaged after 0.png" in error_of(path)


def test_a_size_beyond_the_file_takes_no_memory(tmp_path):
    path = tmp_path / "x.tar"
    info = tarfile.TarInfo("1.png")
    info.size = 2**40
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(DataError, match=r"x\.tar is truncated or damaged at 1\.png"):
        streamed(path)


@pytest.mark.parametrize("content", [b"", b"no tar", bytes(10240)])
def test_what_is_no_shard_is_refused(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar (is not a readable WebDataset tar|has no images)"):
        streamed(tmp_path / "x.tar")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_without_images_is_named(where, tmp_path, workers):
    tar_of(tmp_path / "shards" / "train-000001.tar", {"1.txt": b"words"})
    assert "train-000001.tar has no images (.jpg" in error_of(where, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_with_its_shard(where, tmp_path, workers):
    tar_of(tmp_path / "shards" / "train-000002.tar", {"a.png": encoded(), "a.cls": b"1", "b.png": b"?", "b.cls": b"1"})
    message = error_of(where, workers=workers)
    assert "train-000002.tar:b.png is not a readable image" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_label_that_is_no_number_is_named(tmp_path, stream):
    path = tar_of(tmp_path / "x.tar", {"1.png": encoded(0), "1.cls": b"cat"})
    with pytest.raises(DataError, match=r"x\.tar:1\.cls must hold an integer label, got b'cat'"):
        load_data(str(path), stream=stream)


@pytest.mark.parametrize(("labelled", "says"), [(0, "has no label, but the first"), (1, "has a label, but the first")])
def test_images_with_and_without_labels_are_refused(tmp_path, labelled, says):
    members = {"0.png": encoded(0), "1.png": encoded(1), f"{labelled}.cls": b"7"}
    path = tar_of(tmp_path / "x.tar", dict(sorted(members.items())))
    assert f"x.tar:1.png {says} image has" in error_of(path)


def test_labels_that_are_not_next_to_their_images_are_refused(tmp_path):
    path = tar_of(tmp_path / "x.tar", {"0.png": encoded(0), "1.png": encoded(1), "0.cls": b"7", "1.cls": b"8"})
    assert "x.tar:0.cls has no image next to it" in error_of(path)
    assert labels(load_data(str(path)).loader) == [7, 8]


def test_files_that_would_be_one_endless_sample_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_FILES", 4)
    path = tar_of(tmp_path / "x.tar", {f"a/camera.{i}.png": encoded(i) for i in range(5)})
    with pytest.raises(DataError, match=r"x\.tar: more than 4 files in a row belong to the sample a/camera"):
        streamed(path)
    tar_of(path, {f"a/camera.{i}.png": encoded(i) for i in range(4)})
    assert sum(map(len, streamed(path))) == 4


def test_a_preprocessing_that_fails_is_named_with_the_image(where):
    def fail(image):
        raise RuntimeError("wants a tensor")

    message = error_of(where, preprocess=fail)
    assert "preprocessing failed on" in message
    assert "train-000000.tar:000000.png (8x8 pixels): RuntimeError: wants a tensor" in message


# Memory


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    def peak(count):
        where = str(shard(tmp_path / f"{count}.tar", range(count)))
        dataset = Shards([tmp_path / f"{count}.tar"], lambda image: torch.zeros(1), shuffle=True)
        tracemalloc.start()
        try:
            assert sum(1 for _ in dataset) == count, where
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)  # imports what reading needs
    small, large = peak(1100), peak(2200)
    assert large < 1.1 * small


# Learning


def learned(data, **options):
    return halve.learn(convnet(), data, **{"steps": 12, "lr": 0.5, "permute": False, "fallback": False} | options)


def test_the_first_images_of_a_stream_are_held_back(tmp_path):
    where = write_shards(tmp_path / "shards", each=40)
    split = hold_back(streamed(where, batch_size=16, shuffle=True))
    held, rest = labels(split.held_back), labels(split.data)
    assert len(held) == split.images == 8
    assert sorted([*held, *rest]) == list(range(160))
    masks = learned(streamed(where, batch_size=16, shuffle=True, preprocess=four_channels))
    assert masks.recipe["quality"]["images"] == 8
    assert masks.recipe["quality"]["source"] == "the first images of the stream, which may recur"


def test_epochs_of_a_stream_are_refused(where):
    with pytest.raises(DataError, match=r"epochs= needs data with a length.*; use steps= or minutes="):
        halve.learn(convnet(), streamed(where, preprocess=four_channels), epochs=1, permute=False, validation=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_sees_the_same_images(tmp_path, workers):
    where = write_shards(tmp_path / "shards", each=40)

    def run(state, **options):
        data = streamed(where, batch_size=8, shuffle=True, workers=workers, preprocess=four_channels)
        return learned(data, steps=32, run_state=tmp_path / state, **options)

    with pytest.warns(LearningWarning, match="interrupted after 24 steps"):  # in the second pass
        run("run", report=interrupting(24))
    assert run("run", resume=True) == run("whole")


# One of two processes dies in the second pass; the second time, they go on.
RESUMED = """
import os, signal, sys, torch
from pathlib import Path
from halve.learn.stream import BatchStream
from tests.sources.test_shards import four_channels, learned, streamed
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)

def read(**options):
    return streamed(folder / "shards", batch_size=8, shuffle=True, workers=1, **options)

class Batches:
    def __init__(self, dying):
        self.batches, self.dying, self.given = read(preprocess=four_channels), dying, 0
    def __iter__(self):
        for batch in self.batches:
            self.given += 1
            if self.dying and self.given > 25:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

def run(state, dying=False, **more):
    return learned(Batches(dying), steps=16, run_state=folder / state, save_every=0, **more)

resume = (folder / "run").exists()
masks = run("run", dying=rank == 1 and not resume, resume=resume)
masks.save(folder / f"resumed{rank}.masks.safetensors")
run("whole").save(folder / f"whole{rank}.masks.safetensors")
batches = BatchStream(read(), rank, 2)
torch.save([batches.next()[1].tolist() for _ in range(20)], folder / f"labels{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_processes_read_all_batches_and_use_their_share(tmp_path):
    write_shards(tmp_path / "shards", each=40)
    killed = torchrun(RESUMED, tmp_path)
    assert "SIGKILL" in killed.stderr
    _, header, _ = storage.read(tmp_path / "run", [FORMAT])
    assert 10 < header["step"] < 16  # in the second pass
    again = torchrun(RESUMED, tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    names = [f"{name}{rank}.masks.safetensors" for name in ("resumed", "whole") for rank in range(2)]
    first, *others = [halve.load(tmp_path / name) for name in names]
    assert all(masks == first for masks in others)
    alone = BatchStream(streamed(tmp_path / "shards", batch_size=8, shuffle=True, workers=1))
    shares = [torch.load(tmp_path / f"labels{rank}.pt") for rank in range(2)]
    for turn in zip(*shares, strict=True):
        assert list(turn) == [alone.next()[1].tolist() for _ in range(2)]
