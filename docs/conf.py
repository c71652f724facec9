"""The settings of Sphinx, which makes the site of `make docs` from README.md and docs/."""

from __future__ import annotations

import os
import pathlib

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "include" / "rebatch"
NAVIGATION = {
    "Tutorial": ["docs/guide"],
    "How to": [
        "docs/pytorch",
        "docs/pytorch-memory",
        "docs/pytorch-graphs",
        "docs/pytorch-undo",
        "docs/pytorch-batches",
        "docs/budgets",
        "docs/pytorch-adapters",
        "docs/pytorch-ranks",
        "docs/coming-from",
        "docs/trainers",
        "docs/distributed",
        "docs/fit",
        "docs/probe",
        "docs/check",
        "docs/run",
        "docs/preload",
        "docs/sharing",
        "docs/snapshot",
    ],
    "Reference": [
        "docs/contract",
        "docs/contract-buffers",
        "docs/contract-probe",
        "docs/contract-ranks",
        "docs/config",
        "docs/pytorch-reference",
        "docs/api-python",
        "docs/api-c",
        "CHANGELOG",
    ],
    "Explanation": [
        "docs/design",
        "docs/pool",
        "docs/benchmarks",
        "examples/gpt/README",
        "python/rebatch/fit/standin/README",
    ],
    "Contributing": [".github/CONTRIBUTING", "docs/testing", ".github/SECURITY"],
}

project = "rebatch"
release = os.environ["VERSION"]
html_title = f"rebatch {release}"
html_theme = "furo"
html_theme_options = {"light_css_variables": {"code-font-size": "0.75rem"}}  # 98 columns
html_show_copyright = False
html_copy_source = False
html_extra_path = ["../build/docs/doxygen"]  # its folder c/

root_doc = "README"
include_patterns = [
    "*.md",
    ".github/*.md",
    "docs/*.md",
    "docs/*.rst",
    "examples/gpt/*.md",
    "python/rebatch/fit/standin/*.md",
]
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "none"  # of blocks that name none
default_role = "code"  # of single backticks in docstrings
smartquotes_action = "D"  # dashes; quotes stay as they are

# Python is read, not imported: PyTorch is not needed.
autoapi_dirs = ["python/rebatch"]
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
autoapi_options = ["members", "undoc-members"]
autoapi_python_class_content = "class"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
suppress_warnings = ["autoapi.python_import_resolution"]  # of private modules


def add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """The side bar, by the four kinds of documents, which the file itself has no need of."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            lines = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def mend_links(app: Sphinx, tree: nodes.document) -> None:
    """Links to public headers lead to their pages of the C API; of links to folders, which have no
    page here, the text stays."""
    folder = pathlib.Path(app.srcdir, app.env.docname).parent
    root = "../" * app.env.docname.count("/")
    for node in list(tree.findall(lambda n: isinstance(n, (download_reference, pending_xref)))):
        path = (folder / node["reftarget"]).resolve()
        if path.parent == HEADERS:
            page = root + "c/" + path.name.replace("_", "__").replace(".", "_8") + ".html"
            node.replace_self(nodes.reference("", "", *node.children, refuri=page))
        elif node["reftarget"] and path.is_dir():
            node.replace_self(node.children)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", mend_links, priority=100)  # before files are copied
