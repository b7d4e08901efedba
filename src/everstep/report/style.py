"""Colours and type of reports. The style sheet beside this file is for pages (light and dark), a part of it for
pictures (light); resvg, a small renderer (extra `report`), makes PNG files of those."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError

STATES = ("leader", "active", "standby", "spare", "healing", "suspect", "dead", "left")
COLOURS = 8
PAGE_CSS = resources.files(__package__).joinpath("style.css").read_text()
"""Style of a page: follows the reader's light or dark."""
_LIGHT = dict(re.findall(r"--(\w+): (#\w+);", PAGE_CSS.partition("@media")[0]))


def picture_css() -> str:
    """Style of a picture that stands alone: light, and without variables, which few renderers know."""
    rules = "\n".join(re.findall(r"^\.chart (?=[.t]).*", PAGE_CSS, re.MULTILINE))
    text = re.sub(r"var\(--(\w+)\)", lambda found: _LIGHT[found[1]], rules)
    return text.replace("system-ui, ", "").replace(".chart ", "")


def can_draw() -> bool:
    """Whether the renderer is installed."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        return False
    return True


def write_pictures(folder: Path, figures: dict[str, str], folders: int | None, scale: float = 2.0) -> list[Path]:
    """One PNG per figure, light, `scale` times its nominal size. folders: as for `drafted`.

    Raises: ConfigError if the folder cannot be written.
    """
    import resvg_py

    written = []
    try:
        folder.mkdir(exist_ok=True)
        for name, svg in figures.items():
            path = folder / f"{name}.png"
            png = bytes(resvg_py.svg_to_bytes(svg_string=standalone(svg), zoom=scale, background=_LIGHT["panel"]))
            write_atomically(path, png, folders)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from None
    return written


def standalone(svg: str) -> str:
    """An SVG that carries its own style."""
    head, _, rest = svg.partition(">")
    return f"{head}><style>{picture_css()}</style>{rest}"
