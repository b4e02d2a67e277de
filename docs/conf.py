"""How Sphinx builds the documentation. ``make docs`` calls it; every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import torchestra

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "torchestra"
author = "the torchestra authors"
copyright = "the torchestra authors"  # noqa: A001, Sphinx's name for it
release = version = torchestra.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "offered"]
nitpicky = True  # a reference to something that does not exist is a warning
highlight_language = "python"

# Markdown: links to headings, by the names that GitHub gives these.
myst_heading_anchors = 4

# Docstrings: Google's sections, reStructuredText within.
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # "a, b: what they are" is one line
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "torchestra"
html_copy_source = False
html_show_sphinx = False
