"""The parts of a web page that stands alone: no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

_CSS = """
:root { color-scheme: light dark; --paper: #fbfaf8; --card: #fff; --ink: #222; --quiet: #5c5c5c; --line: #ddd8d0;
  --rule: #8a8a8a; --link: #005a8c; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 17px/1.55 Georgia, "Iowan Old Style", "Liberation Serif", serif; }
main { max-width: 900px; margin: 0 auto; padding: 2.5rem 1.4rem 4rem; }
h1, h2, table, figcaption, .tiles, nav { font-family: "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p, ul, dl { margin: .7rem 0; max-width: 44rem; }
ul { padding-left: 1.2rem; }
li { margin: .3rem 0; }
nav { font-size: .85rem; margin: 1.2rem 0; line-height: 2; }
nav a { margin-right: 1.1rem; white-space: nowrap; }
a { color: var(--link); text-decoration-thickness: 1px; text-underline-offset: 2px; }
.lead { font-size: 1.2rem; line-height: 1.5; }
.quiet { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.6rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { font-size: .82rem; color: var(--quiet); line-height: 1.35; display: block; }
figure { margin: 1.4rem 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption, caption { font-size: .85rem; color: var(--quiet); margin-top: .6rem; }
caption { text-align: left; padding-bottom: .4rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(44rem, calc(100vw - 2.2rem)); }
figure .wide { margin: 0; max-height: none; }
.wide { overflow: auto; margin: 1.2rem 0; max-height: 40rem; }
table { border-collapse: collapse; font-size: .86rem; line-height: 1.35; min-width: 50%;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .38rem 1.4rem .38rem 0; border-bottom: 1px solid var(--line);
  font-weight: normal; }
thead th { position: sticky; top: 0; background: var(--paper);
  vertical-align: bottom; border-bottom: 1.5px solid var(--rule); font-weight: 600; }
th.number, td.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
td small, th small { color: var(--quiet); display: block; font-size: .8rem; }
td, tbody th { overflow-wrap: break-word; }
dt { font-weight: bold; margin-top: .7rem; }
dd { margin: 0 0 0 1.2rem; }
code { font-family: "SFMono-Regular", Consolas, "Liberation Mono", monospace; font-size: .88em; }
@media (max-width: 600px) { body { font-size: 16px; } main { padding: 1.4rem 1rem 3rem; }
  h1 { font-size: 1.5rem; } figure { padding: .4rem; } th, td { padding-right: .9rem; }
  figure img { width: 640px; max-width: none; } }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --card: #1e2125; --ink: #e4e2de; --quiet: #a6a6a2; --line: #383c42; --rule: #74787e;
    --link: #7cc0ec; }
  figure img { filter: invert(.88) hue-rotate(180deg); } }
@media print { :root { color-scheme: light; }
  body { background: #fff; font-size: 11pt; } main { max-width: none; padding: 0; } nav { display: none; }
  figure, .tile, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; max-height: none; } }
"""


class Markup(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def text(value: str) -> Markup:
    """Text as HTML."""
    return value if isinstance(value, Markup) else Markup(escape(value))


def tag(name: str, *content: str, **attributes: str) -> Markup:
    """Return an element; `class_` stands for the attribute class.

    Examples
    --------
    >>> tag("p", "1 < 2", class_="lead")
    '<p class="lead">1 &lt; 2</p>'
    """
    given = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{''.join(map(text, content))}</{name}>")


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", num_text: int = 1, last_text: int = 0
) -> Markup:
    """Return a table of text, which scrolls where it is wider than the page; the first column names the rows.

    Parameters
    ----------
    header : sequence of str, of shape (n,)
    rows : sequence of such sequences
    caption : str
        What it is about.
    num_text, last_text : int
        So many columns at the left and at the right hold text; those between hold numbers.
    """

    def cell(i: int, content: str, scope: str) -> Markup:
        is_number = i in range(num_text, len(header) - last_text)
        attributes = {"class_": "number"} if is_number else {}
        return tag("th", content, scope=scope, **attributes) if scope else tag("td", content, **attributes)

    head = tag("thead", tag("tr", *(cell(i, content, "col") for i, content in enumerate(header))))
    lines = (tag("tr", *(cell(i, c, "" if i else "row") for i, c in enumerate(cells))) for cells in rows)
    name = tag("caption", tag("span", caption)) if caption else Markup("")
    # what scrolls can be reached from the keyboard
    return tag("div", tag("table", name, head, tag("tbody", *lines)), class_="wide", tabindex="0")


def tiles(items: Sequence[tuple[str, str]]) -> Markup:
    """Figures, each with what it is."""
    return tag("div", *(tag("div", tag("b", a), tag("span", b), class_="tile") for a, b in items), class_="tiles")


def figure(png: bytes, *, alt: str, caption: str) -> Markup:
    """Return a picture, held in the page itself."""
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    picture = tag("div", Markup(f'<img src="{source}" alt="{escape(alt)}">'), class_="wide", tabindex="0")
    return tag("figure", picture, tag("figcaption", caption))


def page(title: str, lead: Sequence[str], sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a whole page.

    Parameters
    ----------
    title : str
    lead : sequence of str
        What stands above the sections.
    sections : sequence of (heading, parts)
    """
    links = tag("nav", Markup(" ".join(tag("a", name, href=f"#{_anchor(name)}") for name, _ in sections)))
    parts = [tag("section", tag("h2", name, id=_anchor(name)), *content) for name, content in sections]
    body = tag("main", tag("h1", title), *lead, links, *(Markup(f"\n{part}") for part in parts))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tag('title', title)}\n{tag('style', Markup(_CSS))}\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _anchor(name: str) -> str:
    return "-".join(name.lower().split())
