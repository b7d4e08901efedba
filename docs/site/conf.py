"""Sphinx's settings for the site; `make_site.py` makes its source."""

import everstep

project = "Everstep"
author = "the Everstep authors"
version = release = everstep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Everstep {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["smartquotes"]
smartquotes = False
suppress_warnings = ["misc.highlighting_failure", "myst.header"]
nitpicky = False
autodoc_typehints = "none"
