"""How Sphinx builds these pages: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "accel"
html_title = "accel"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "recipe_pages"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # blocks of a recipe's text may hold an ellipsis

default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
