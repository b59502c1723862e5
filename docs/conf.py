"""Sphinx settings: `make docs` builds the site with warnings as errors."""

import sys
from pathlib import Path

import apt_jax

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "apt-jax"
author = "The apt-jax authors"
copyright = f"2026, {author}"
version = release = apt_jax.__version__

extensions = [
    "myst_nb",  # Markdown pages and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google style
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
    "generated_pages",  # command line and HTTP API, from parsers and OpenAPI; links out of docs/
]
exclude_patterns = ["_build", "_ext", "reference/generated"]

myst_enable_extensions = ["deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run the notebooks

default_role = "code"  # docstrings write names in single backticks, as Markdown does
highlight_language = "text"  # of blocks that name none
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_title = f"apt-jax {release}"
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]
