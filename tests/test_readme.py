"""The code in the README runs, as written, from top to bottom."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
