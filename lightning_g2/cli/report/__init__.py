"""``g2-report``: one run as one page, from its TensorBoard log and what lies beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_g2.cli.report.log import RunLog
from lightning_g2.cli.report.page import page
from lightning_g2.cli.report.panel import panels, sheet
from lightning_g2.errors import ConfigurationError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``g2-report``.

    Args:
        argv: arguments, without the program's name; the process's own by default.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(
        prog="g2-report", description="Make one page (HTML) and one picture (PNG) of one run, from its TensorBoard log."
    )
    parser.add_argument("log_dir", type=Path, help="folder of the run, or of its log, as g2-train prints it")
    parser.add_argument("--html", type=Path, default=None, help="page to write (default: beside the picture)")
    parser.add_argument("--png", type=Path, default=Path("report.png"), help="picture to write (default: report.png)")
    parser.add_argument("--title", default="", help="title of both")
    arguments = parser.parse_args(argv)
    target: Path = arguments.html or arguments.png.with_suffix(".html")
    try:
        run = RunLog(arguments.log_dir)
        title = arguments.title or str(run.config.get("name") or arguments.log_dir)
        shown = panels(run)
        arguments.png.write_bytes(sheet(shown, title))
        target.write_text(page(run, shown, title), encoding="utf-8")
    except ConfigurationError as error:
        print(f"g2-report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"g2-report: {error.filename}: cannot be written ({error.strerror}); name another file", file=sys.stderr)
        return 2
    print(target)
    print(arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
