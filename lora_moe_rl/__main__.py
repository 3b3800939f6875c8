"""`python -m lora_moe_rl` is `lora-moe-rl`."""

import sys

from lora_moe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
