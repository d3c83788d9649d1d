# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the site; `make site` writes it to build/site."""

from amp_ir.version import VERSION

project = "amp_ir"
copyright = "the amp_ir authors, Apache-2.0"  # noqa: A001 (Sphinx's name)
version = release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
# Docstrings write code in single backquotes.
default_role = "code"
# Links to headings, as the pages have them on a code host too.
myst_heading_anchors = 4
# What a docstring says of a name needs no path before it.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Long signatures are read line by line.
maximum_signature_line_length = 80
html_theme = "furo"
html_title = f"amp_ir {VERSION}"
html_static_path = ["static"]
html_css_files = ["wide_tables.css"]
html_show_sphinx = False
# Sources are pages already.
html_copy_source = False
