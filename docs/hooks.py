"""For mkdocs, see mkdocs.yml."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Links from notebook to notebook, which mkdocs-jupyter leaves as they are, lead to their pages."""
    return re.sub(r'href="(\d\w+)\.ipynb"', r'href="\1.html"', html)
