"""Figures as PNG files, through resvg, a small renderer (extra `report`)."""

from __future__ import annotations

from pathlib import Path

from everstep.base.errors import ConfigError
from everstep.report.style import LIGHT, picture_css


def can_draw() -> bool:
    """Whether the renderer is installed."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        return False
    return True


def write_pictures(folder: Path, figures: dict[str, str], scale: float = 2.0) -> list[Path]:
    """One PNG per figure, light, `scale` times its nominal size.

    Raises: ConfigError if the folder cannot be written.
    """
    import resvg_py

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, svg in figures.items():
            path = folder / f"{name}.png"
            path.write_bytes(
                bytes(resvg_py.svg_to_bytes(svg_string=standalone(svg), zoom=scale, background=LIGHT["panel"]))
            )
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from None
    return written


def standalone(svg: str) -> str:
    """An SVG that carries its own style."""
    head, _, rest = svg.partition(">")
    return f"{head}><style>{picture_css()}</style>{rest}"
