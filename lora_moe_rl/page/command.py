"""`lora-moe-rl view`: a page in the browser that shows runs, while they run and afterwards.

RUNS_DIR is a directory with runs in it, or one run. The page is served on this machine alone; on
another, forward its port: ssh -L 7420:127.0.0.1:7420 HOST. Nothing is fetched from elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lora_moe_rl.config.options import positive
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files.out_directory import require_file
from lora_moe_rl.page.link import HOST, PORT

SAMPLES_SENT = 400


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _require_runs(options.runs)
    if options.static is not None:
        require_file(options.static, "--static")
        from lora_moe_rl.files.replacing import replace_file
        from lora_moe_rl.page.static_page import static_page

        html = static_page(options.runs, options.samples).encode()
        replace_file(options.static, html)
        print(f"{options.static} ({len(html) / 1e6:.1f} MB)")
        return 0
    from lora_moe_rl.page.server import listen, make_server

    with listen(options.port) as socket:
        print(f"http://{HOST}:{socket.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            make_server(options.runs).run(sockets=[socket])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, metavar="RUNS_DIR", help="a directory with runs, or one")
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any that is free ({PORT})")
    parser.add_argument(
        "--static", type=Path, metavar="FILE", help="write the page as one file, and end"
    )
    parser.add_argument(
        "--samples",
        type=positive,
        default=SAMPLES_SENT,
        help=f"of each run in that file, at most ({SAMPLES_SENT})",
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def _require_runs(root: Path) -> None:
    """Raises RunDirError when there is nothing to show."""
    from lora_moe_rl.page.runs import DEPTH, Runs

    if not root.is_dir():
        raise RunDirError(f"{root} is not a directory; name one with runs in it, or a run's own")
    if not Runs(root).look():
        raise RunDirError(
            f"{root} has no run in it, {DEPTH} folders deep (config.yaml beside metrics.jsonl); "
            "name a directory with runs in it, or a run's own"
        )
