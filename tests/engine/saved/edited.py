"""Files with compiled networks that were edited by someone who knows the format: their checksum fits."""

import copy

from halve.engine.saved.file import FORMAT
from halve.masks import storage


def contents(path):
    """The header and the tensors of a file."""
    _, header, tensors = storage.read(path, [FORMAT])
    return header, tensors


def edited(path, edit):
    """Another file beside this one, after `edit(header, tensors)`."""
    header, tensors = copy.deepcopy(contents(path))
    edit(header, tensors)
    return storage.write(path.with_name("edited"), FORMAT, header, tensors)
