"""The memory and time that reading a file takes."""

import json
import os
import subprocess
import sys

from tests.processes import environment

MEASURE = """
import json, os, resource, sys, time
from halve import load, load_compiled, unpack
from halve.errors import HalveError

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def measure(read, path):
    before, start, error = peak(), time.process_time(), ""
    try:
        read(path)
    except HalveError as found:
        error = str(found)[:500]
    return [peak() - before, time.process_time() - start, error]

read = {"load": load, "load_compiled": load_compiled, "unpack": unpack}[sys.argv[1]]
try:
    read(sys.argv[2])  # what is set up once counts for no file
except HalveError:
    pass
for path in sys.argv[3:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, path
    else:
        print(json.dumps(measure(read, path)), flush=True)
        os._exit(0)
"""


def measured(tmp_path, read, first, makers):
    """Errors of reading files, each in its own process after reading `first`. Their peak memory and time are checked.

    Args:
        tmp_path: where to write files.
        read: the function that reads them, by name.
        first: a small file of their kind.
        makers: functions that write a file and return its path, by name.
    """
    paths = [make(tmp_path / f"file{number}") for number, make in enumerate(makers.values())]
    command = [sys.executable, "-c", MEASURE, read, *map(str, [first, *paths])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    results = dict(zip(makers, map(json.loads, done.stdout.splitlines()), strict=True))
    most = {name: 64 * os.path.getsize(path) + 100e6 for name, path in zip(makers, paths, strict=True)}
    assert not {name: (peak, most[name]) for name, (peak, _, _) in results.items() if peak > most[name]}
    assert not {name: seconds for name, (_, seconds, _) in results.items() if seconds > 15}
    return {name: error for name, (_, _, error) in results.items()}
