"""What the page asks for, as JSON: a function for each question, of a run and a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_moe_rl.files.unchanged import flat
from lora_moe_rl.page.norms import adapter_norms
from lora_moe_rl.page.runs import Run
from lora_moe_rl.page.samples import ORDERS, Choice

PAGE = 50  # samples of a list
MOST = 200
STEPS = 6  # of a timeline


class BadQuery(ValueError):
    """A query that makes no sense; the text says what is wrong with it."""


class Query:
    """The parameters of a question. A name that was not asked for in the end is an error: a filter
    that is not applied would show other samples than the page says."""

    def __init__(self, items: Sequence[tuple[str, str]]):
        self._items = [(name, value) for name, value in items if value != ""]
        self._asked: set[str] = {"run"}

    def text(self, name: str) -> str:
        return next(iter(self.every(name)), "")

    def every(self, name: str) -> list[str]:
        self._asked.add(name)
        return [value for key, value in self._items if key == name]

    def whole(self, name: str) -> int | None:
        return self._number(name, int, "a whole number")

    def number(self, name: str) -> float | None:
        return self._number(name, float, "a number")

    def _number(self, name: str, kind: Callable[[str], Any], what: str) -> Any:
        text = self.text(name)
        try:
            return kind(text) if text else None
        except ValueError:
            raise BadQuery(f"{name}={text!r} is not {what}") from None

    def check(self) -> None:
        for name, _ in self._items:
            if name not in self._asked:
                raise BadQuery(f"{name!r} is not asked for here")


def names(run: Run, query: Query) -> dict[str, Any]:
    query.check()
    return {"names": run.metrics.names()}


def metrics(run: Run, query: Query) -> dict[str, Any]:
    wanted, since = query.every("name"), query.whole("since") or 0
    generation = query.whole("generation") or 0
    query.check()
    return run.metrics.columns(wanted, since, generation)


def settings(run: Run, query: Query) -> dict[str, Any]:
    query.check()
    return {"settings": flat(run.config)}


def samples(run: Run, query: Query) -> dict[str, Any]:
    order = query.text("order") or ORDERS[0]
    if order not in ORDERS:
        raise BadQuery(f"order={order!r} is not one of {', '.join(ORDERS)}")
    choice = Choice(
        step_from=query.whole("step_from"),
        step_to=query.whole("step_to"),
        drawn=query.whole("drawn"),
        reward_from=query.number("reward_from"),
        reward_to=query.number("reward_to"),
        finish=query.text("finish"),
        data_set=query.text("data_set"),
        text=query.text("text"),
        order=order,
    )
    offset, limit = query.whole("offset") or 0, query.whole("limit") or PAGE
    query.check()
    if offset < 0 or not 1 <= limit <= MOST:
        raise BadQuery(f"offset={offset}, limit={limit}: 0 or more, and 1 to {MOST}")
    return run.samples.choose(choice, offset, limit)


def sample(run: Run, query: Query) -> dict[str, Any] | None:
    number = query.whole("number")
    query.check()
    if number is None:
        raise BadQuery("which sample? number=N, its place in samples.jsonl")
    return run.sample(number)


def timeline(run: Run, query: Query) -> dict[str, Any]:
    last, count = query.whole("step"), query.whole("count") or STEPS
    query.check()
    return run.spans.of_steps(last, min(max(count, 1), 50))


def routes(run: Run, query: Query) -> dict[str, Any]:
    last = query.whole("step")
    query.check()
    return run.routes.of_step(last)


def layer_routes(run: Run, query: Query) -> dict[str, Any]:
    layer = query.whole("layer")
    query.check()
    if layer is None:
        raise BadQuery("which layer? layer=N")
    return run.routes.of_layer(layer)


def adapter(run: Run, query: Query) -> dict[str, Any]:
    query.check()
    return adapter_norms(run)


ANSWERS: Mapping[str, Callable[[Run, Query], dict[str, Any] | None]] = {
    "names": names,
    "metrics": metrics,
    "settings": settings,
    "samples": samples,
    "sample": sample,
    "timeline": timeline,
    "routes": routes,
    "layer_routes": layer_routes,
    "adapter": adapter,
}
