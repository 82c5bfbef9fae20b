"""docs/tasks.md keeps its word: its examples are executed as they stand, on fakeredis."""

from __future__ import annotations

import asyncio
import re
import types
from pathlib import Path
from typing import Any

from dtq_child import App
from dtq_child.testing import faked, work

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_run() -> None:
    page = PAGE.read_text()
    blocks = [(page[: found.start()].count("\n") + 1, found[1]) for found in _BLOCK.finditer(page)]
    assert len(blocks) > 8
    shop = types.ModuleType("shop.tasks")
    names = vars(shop)
    first_line, first_block = blocks.pop(0)
    run(first_block, first_line, names)
    app: App = names["app"]
    with faked(app):
        for line, block in blocks:
            run(block, line, names)
        app_of_last_section, names["app"] = names["app"], app
        assert work(app, due=True) > 100
        worked = asyncio.run(view_while_working(app, names["view"]))
        assert worked == {"width": 128}
        orders = app.enqueue("shop.import_orders", {"file": "part.csv"})
        assert work(app, due=True) == 2
        assert orders.result(0) == 1000
    names["app"] = app_of_last_section
    names["test_inline"]()
    names["test_pipeline"]()


def run(block: str, line: int, names: dict[str, Any]) -> None:
    exec(compile("\n" * line + block, PAGE, "exec"), names)


async def view_while_working(app: App, view: Any) -> Any:
    asked = asyncio.create_task(view())
    await asyncio.sleep(0)
    while not asked.done():
        await asyncio.to_thread(work, app)
    return asked.result()
