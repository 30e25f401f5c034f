import pytest

import halve
from tests.report.inputs import write_all


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """The options of `halve.report` with every input, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("report")
    return folder, write_all(folder)


@pytest.fixture(scope="session")
def full_page(everything):
    """The page with all parts, and its file."""
    folder, options = everything
    masks, *_ = (options["masks"],)
    page = halve.report(masks, **{key: value for key, value in options.items() if key != "masks"}, progress=False)
    return page, page.save(folder / "net.report.html")
