"""The tables in docs/machines.md are what the commands above them print.

`python -m tests.test_docs` puts in what they print now.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thunderep.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "machines.md"
BLOCK = re.compile(r"```console\n\$ thunderep ([^\n]*)\n(.*?)```", re.DOTALL)


def printed(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.splitlines()).strip("\n") + "\n"


def blocks() -> list[tuple[str, str]]:
    """Commands, and the tables below them."""
    return BLOCK.findall(PAGE.read_text())


@pytest.mark.parametrize(("command", "table"), blocks(), ids=[command for command, _ in blocks()])
def test_the_page_shows_what_its_command_prints(command: str, table: str) -> None:
    assert table == printed(command), "the simulation has changed: python -m tests.test_docs"
    assert "simulated, not measured" in table


if __name__ == "__main__":
    text = PAGE.read_text()
    for command, table in blocks():
        text = text.replace(f"$ thunderep {command}\n{table}```", f"$ thunderep {command}\n{printed(command)}```")
    PAGE.write_text(text)
