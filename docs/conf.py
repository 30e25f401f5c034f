"""How the site is built: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from halve.version import VERSION

project = "halve"
version = release = VERSION
copyright = "the authors of halve, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_help", "notebooks"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!halve\.).*")]  # types of other libraries, whose sites are not asked
suppress_warnings = ["config.cache"]

myst_heading_anchors = 4  # links to headings, as on GitHub
myst_enable_extensions = ["colon_fence"]
smartquotes = False  # strings in docstrings are code
default_role = "code"  # single backticks in docstrings

autodoc_typehints = "none"  # `Args:` says what is accepted
autodoc_member_order = "bysource"
add_module_names = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"halve {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "monokai"
