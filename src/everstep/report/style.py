"""Colours and type of reports: one style sheet for pages (light and dark) and for pictures (light). Pure."""

from __future__ import annotations

import re

LIGHT = {
    "bg": "#fbfbfa",
    "panel": "#ffffff",
    "ink": "#1c2127",
    "soft": "#5a6572",
    "line": "#dfe3e8",
    "grid": "#eceff2",
    "c0": "#2f66c9",
    "c1": "#b85c12",
    "c2": "#23805a",
    "c3": "#7a52bd",
    "c4": "#0f7c8f",
    "c5": "#a8355f",
    "c6": "#7a6a12",
    "c7": "#56606b",
    "good": "#23805a",
    "warn": "#a86500",
    "bad": "#c22f3d",
    "leader": "#1f4fa8",
    "active": "#5b8bdc",
    "standby": "#9cc3d9",
    "spare": "#c9ced4",
    "healing": "#e0a63a",
    "suspect": "#e07b2a",
    "dead": "#d0404d",
    "left": "#e4e7ea",
}
DARK = {
    **LIGHT,
    "bg": "#14171a",
    "panel": "#1b1f24",
    "ink": "#e6e9ec",
    "soft": "#a0aab5",
    "line": "#2f363d",
    "grid": "#262c32",
    "c0": "#7aa7f5",
    "c1": "#eda05c",
    "c2": "#5fc79b",
    "c3": "#b79af0",
    "c4": "#55c3d6",
    "c5": "#ee86ac",
    "c6": "#d6c45a",
    "c7": "#aab4be",
    "good": "#5fc79b",
    "warn": "#e5b04c",
    "bad": "#f2737f",
    "leader": "#4d86ea",
    "active": "#345f9f",
    "standby": "#3d6a80",
    "spare": "#454d55",
    "healing": "#b98726",
    "suspect": "#c26a20",
    "dead": "#c23846",
    "left": "#2a3036",
}
STATES = ("leader", "active", "standby", "spare", "healing", "suspect", "dead", "left")
COLOURS = 8

CHARTS = """
.chart text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: var(--soft); }
.chart .name { fill: var(--ink); font-weight: 600; font-size: 14px; }
.chart .value { fill: var(--ink); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .axis { stroke: var(--line); stroke-width: 1; }
.chart .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart .band { stroke: none; opacity: 0.16; }
.chart .mark { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 3; opacity: 0.75; }
.chart .mark.soft { stroke: var(--soft); opacity: 0.55; }
.chart .fault { fill: var(--bad); }
.chart .recovery { fill: var(--warn); opacity: 0.35; }
"""

PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, 'DejaVu Sans', sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.55rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 34px 0 10px; }
p { margin: 6px 0; max-width: 75ch; }
.soft { color: var(--soft); }
.state { font-weight: 700; }
.state.good { color: var(--good); } .state.warn { color: var(--warn); } .state.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 18px 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: 0.82rem; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px; margin: 12px 0;
  overflow-x: auto; }
.chart { display: block; width: 100%; height: auto; min-width: 520px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; }
th:last-child, td:last-child { padding-right: 0; }
td:last-child:not(.n) { overflow-wrap: anywhere; min-width: 11em; } td.n, th.n { white-space: nowrap; }
code { font: 0.88em ui-monospace, 'DejaVu Sans Mono', monospace; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--soft); }
pre { overflow: auto; max-height: 420px; font: 12px/1.45 ui-monospace, 'DejaVu Sans Mono', monospace; }
@media print { .panel, .tile { break-inside: avoid; } }
"""


def page_css() -> str:
    """For a page: follows the reader's light or dark."""
    dark = _variables(DARK)
    return (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
        f"@media print {{ :root {{ {_variables(LIGHT)} }} }}{_fills()}{CHARTS}{PAGE}"
    )


def picture_css() -> str:
    """For a picture that stands alone: light, and without variables, which few renderers know."""
    text = re.sub(r"var\(--([a-z0-9]+)\)", lambda found: LIGHT[found[1]], _fills() + CHARTS)
    return text.replace("system-ui, ", "").replace(".chart ", "")


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _fills() -> str:
    rules = [f".chart .s-{name} {{ fill: var(--{name}); }}" for name in STATES]
    for i in range(COLOURS):
        rules.append(f".chart .f{i} {{ fill: var(--c{i}); }}")
        rules.append(f".chart .l{i} {{ stroke: var(--c{i}); }}")
    return "\n".join(rules)
