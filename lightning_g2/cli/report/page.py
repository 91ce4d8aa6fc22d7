"""One run as one HTML file: pictures inline, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from omegaconf import OmegaConf

from lightning_g2.cli.report.log import RunLog
from lightning_g2.cli.report.panel import Panel, png

_STYLE = """
:root { --ink: #2b2b2b; --soft: #6a6a6a; --line: #e2e2e2; --blue: #2f5d8a; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f6f4; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.sub { color: var(--soft); margin: 0 0 18px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 10px; }
.tile, .card, .box { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 20px; color: var(--blue); }
.tile span { color: var(--soft); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
figure.card { margin: 0; padding: 12px 14px; } figure h3 { margin: 0; font-size: 15px; }
figcaption { color: var(--soft); font-size: 13px; margin: 0 0 6px; }
figure img { width: 100%; height: auto; display: block; }
.lacking { color: var(--soft); font-style: italic; padding: 30px 10px; text-align: center; }
.box { padding: 12px 16px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 13px; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } table.words td { text-align: left; white-space: normal; }
pre { margin: 0; font: 12.5px/1.45 ui-monospace, "Cascadia Mono", Menlo, monospace; white-space: pre-wrap; }
summary { cursor: pointer; color: var(--blue); } ul { margin: 0; padding-left: 20px; }
"""

_COLUMNS = (
    ("samples", "samples", "{:,.0f}"), ("pushes", "pushes", "{:,.0f}"), ("staleness_mean", "mean τ", "{:.2f}"),
    ("staleness_max", "max τ", "{:.0f}"), ("weight_mean", "mean weight", "{:.3f}"),
    ("rejected", "rejected", "{:,.0f}"), ("late", "late", "{:,.0f}"), ("bytes_sent", "MB sent", "{:,.1f}"),
    ("bytes_saved", "MB saved", "{:,.1f}"), ("train_s", "training, s", "{:.1f}"), ("idle_s", "idle, s", "{:.1f}"),
)  # fmt: skip

_ROUTING = (
    "gate", "gate_options", "aggregate", "buffer_weights", "delayed_nesterov", "rounds", "late", "staleness_cost",
    "local_steps", "push", "pull", "consistency", "wire_dtype", "dispatch", "lr_clock", "servers",
)  # fmt: skip


def page(run: RunLog, shown: Sequence[Panel], title: str) -> str:
    """The page.

    Args:
        run: the run.
        shown: its pictures.
        title: its heading.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(str(run.folder))}</p>',
        _tiles(run),
        '<h2>Curves</h2><div class="cards">' + "".join(map(_card, shown)) + "</div>",
        "<h2>Ranks</h2>" + _ranks(run),
        "<h2>Routing in force</h2>" + _routing(run),
        "<h2>Configuration</h2>" + _configuration(run),
        "<h2>What this log lacks</h2>" + _lacks(run, shown),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _tiles(run: RunLog) -> str:
    """What one looks for first."""
    facts, found = run.facts, []
    for tag, curve in run.losses().items():
        found.append((f"{curve.values[-1]:.4f}", f"{tag}, last"))
    if (wall := facts.get("wall_s")) is not None:
        found.append((f"{wall:.1f} s", "wall time"))
        found.append((f"{facts['samples']:,}", "samples behind applied pushes"))
        found.append((f"{facts['samples'] / wall:.1f} /s" if wall else "n/a", "goodput, samples"))
    if (idle := facts.get("idle_fraction")) is not None:
        found.append((f"{100 * idle:.1f} %", "of training time spent waiting"))
    if (ranks := facts.get("ranks")) is not None:
        found.append((str(ranks), f"ranks, strategy {facts.get('strategy', '')}"))
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in found
    )
    return f'<div class="tiles">{tiles}</div>'


def _card(panel: Panel) -> str:
    if panel.draw is None:
        body = f'<div class="lacking">Not shown: {escape(panel.lacking)}.</div>'
    else:
        body = f'<img alt="{escape(panel.title)}" src="data:image/png;base64,{png(panel)}">'
    head = f"<h3>{escape(panel.title)}</h3><figcaption>{escape(panel.note)}</figcaption>"
    return f'<figure class="card">{head}{body}</figure>'


def _ranks(run: RunLog) -> str:
    count = int(run.facts.get("ranks") or 0)
    if not count:
        return '<div class="box lacking">No table of ranks: there is no report.json of g2-train beside the log.</div>'
    rows = []
    for rank in range(count):
        cells = [str(rank)]
        for name, _, form in _COLUMNS:
            value = run.facts.get(f"rank{rank}_{name}")
            scale = 1e-6 if name.startswith("bytes") else 1.0
            cells.append("n/a" if value is None else form.format(value * scale))
        rows.append(cells)
    return _table(("rank", *(heading for _, heading, _ in _COLUMNS)), rows)


def _routing(run: RunLog) -> str:
    strategy = run.config.get("strategy")
    given = strategy if isinstance(strategy, Mapping) else {}
    rows = [[name, _plain(given[name])] for name in _ROUTING if given.get(name) is not None]
    words = _table(("option", "value"), rows, words=True) if rows else (
        '<div class="box lacking">The configuration, as far as it was found, does not say how pushes were routed.</div>'
    )  # fmt: skip
    decisions = run.texts("g2/rounds")
    if not decisions:
        return words
    said = [[str(step), f"{seconds:.1f}", text] for step, seconds, text in decisions]
    return (
        words
        + '<p class="sub">Decisions of rounds="auto"</p>'
        + _table(("step", "s", "from then on"), said, words=True)
    )


def _configuration(run: RunLog) -> str:
    if run.config_file is None:
        return (
            '<div class="box lacking">None found beside the log: neither job.yaml of g2-train, .hydra/config.yaml, nor '
            "hparams.yaml with anything in it (call save_hyperparameters()).</div>"
        )
    text = OmegaConf.to_yaml(OmegaConf.create(run.config))
    head = f"<summary>{escape(str(run.config_file))}</summary>"
    return f'<div class="box"><details open>{head}<pre>{escape(text)}</pre></details></div>'


def _lacks(run: RunLog, shown: Sequence[Panel]) -> str:
    lacking = [f"{panel.title}: {panel.lacking}." for panel in shown if panel.draw is None]
    losses = run.losses()
    if losses and not any("val" in tag for tag in losses):
        lacking.append("A validation loss.")
    if not run.facts:
        lacking.append("The table of ranks, wall time and idle time: report.json is written by g2-train.")
    if run.config_file is None:
        lacking.append("The run's configuration.")
    if not lacking:
        return '<div class="box">Nothing that this page shows.</div>'
    return '<div class="box"><ul>' + "".join(f"<li>{escape(line)}</li>" for line in lacking) + "</ul></div>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="box"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items() if item is not None) or "defaults"
    return str(value)
