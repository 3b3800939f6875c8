"""Rows and generators of rows, as files."""

import json

import pytest

GENERATORS = """
def counting(seed):
    for i in range(10 ** 9):
        yield {"prompt": f"{seed}:{i}", "answer": i}

def three():
    return iter([{"prompt": c} for c in "abc"])

def other_three():
    return iter([{"prompt": c} for c in "abd"])

def chance():
    import random
    while True:
        yield {"prompt": f"{random.random():.9f}"}

def none():
    return []

def sums(level, most=9, *, sign="+", seed=0):
    return iter([{"prompt": f"{level}{sign}{most}s{seed}"}])

def anything(**settings):
    return iter([{"prompt": str(sorted(settings))}])

def some_long():
    for i in range(1, 100):
        yield {"prompt": str(i) if i % 2 else "x" * 25}

def only_long():
    yield {"prompt": "x" * 25}

def ever_longer():
    for i in range(10 ** 9):
        yield {"prompt": "x" * 25}

def bad():
    yield {"prompt": "fine"}
    yield {"prompt": "x" * 25}
"""


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "data.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_text("".join(line + "\n" for line in lines))
        return str(file)

    return write


@pytest.fixture
def generators(tmp_path):
    file = tmp_path / "generators.py"
    file.write_text(GENERATORS)
    return file
