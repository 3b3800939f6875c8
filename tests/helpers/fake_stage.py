"""A stage that behaves as the first argument says: `python fake_stage.py HOW ... FILE`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(how: str, file: Path, told: list[str]) -> None:
    if how == "passes":
        file.write_text(json.dumps({"one": 1}))
    elif how == "hangs":
        file.write_text(json.dumps({"first": 1}))
        time.sleep(600)
    elif how == "raises":
        file.write_text(json.dumps({"first": 1}))
        raise RuntimeError("no such GPU")
    elif how == "half":
        file.write_text('{"one": 1, "tw')
    elif how == "leaves":
        # One in its own session, and one that takes its mark off as well.
        bare = {name: value for name, value in os.environ.items() if "STAGE" not in name}
        children = [
            subprocess.Popen(["sleep", "613"], start_new_session=True),
            subprocess.Popen(["sleep", "613"], start_new_session=True, env=bare),
        ]
        Path(told[0]).write_text(" ".join(str(child.pid) for child in children))
        file.write_text(json.dumps({"children": 2}))
        time.sleep(float(told[1]))
    elif how == "part raises":
        from lora_moe_rl.bench.gpu.parts import Parts

        parts = Parts(file)
        parts.part("good", lambda: {"figure": 2})
        parts.part("bad", lambda: 1 / 0)
        parts.part("after", lambda: {"figure": 3})
        sys.exit(bool(parts.failed))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[-1]), sys.argv[2:-1])
