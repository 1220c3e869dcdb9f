"""Writes the tables and figures of all runs below a directory."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from kln_jax.analysis import runs, tables
from kln_jax.analysis.suites import SUITES


def write(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Writes ``report.md``, ``report.csv`` and ``report.tex``.

    Args:
      out: Where all runs lie.

    Yields:
      Each file.

    Raises:
      ValueError: If no run is finished there.
    """
    records = runs.read(out)
    found = {name: tables.rows(suite, records) for name, suite in SUITES.items()}
    for suffix, text in (
        ("md", _markdown(found)),
        ("csv", tables.comma_separated(found)),
        ("tex", tables.latex(found)),
    ):
        path = out / f"report.{suffix}"
        path.write_text(text)
        yield path


def _markdown(found: dict[str, list[dict[str, str]]]) -> str:
    sections = [
        "# Runs, and the paper's tables\n\n"
        "Mean ± standard deviation over seeds. *Last ten epochs* has the median of the "
        "values after each of them; nothing is chosen by the test set. Runs of fewer "
        "epochs, or on a part of the data, say so, and have no difference to the "
        "paper.\n"
    ]
    for name, table in found.items():
        suite = SUITES[name]
        sections.append(
            f"## {suite.title}\n\n"
            f"`python -m kln_jax.analysis run {name} --out=DIR`; "
            f"{tables.QUANTITIES[suite.quantity].text}.\n\n{tables.markdown(table)}"
        )
    return "\n".join(sections)
