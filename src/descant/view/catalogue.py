"""An entry of a registry, for people: what it is, its fields and presets."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from descant.experiment.catalogue import CHOSEN_BY, as_toml


def show(console: Console, entry: dict[str, Any]) -> None:
    """Print an entry for people."""
    console.print(f"{entry['name']} ({entry['kind']})")
    console.print(entry["summary"])
    if entry["description"]:
        console.print(f"\n{entry['description']}")
    console.print(f"\nchoose it with  --set {CHOSEN_BY[entry['kind']]}={entry.get('choice', entry['name'])}")
    section = CHOSEN_BY[entry["kind"]].partition(".")[0]
    if entry["fields"]:
        console.print(f"\nfields of [{section}]")
        _print_fields(console, entry["fields"])
    if entry.get("presets"):
        console.print(f"\npresets, as in {section}.preset = \"{next(iter(entry['presets']))}\"")
        for name, values in entry["presets"].items():
            words = ", ".join(f"{key} = {as_toml(item)}" for key, item in values.items())
            console.print(f"  {name}: {words}")
    for field in entry["fields"]:
        for option in field["options"]:
            choice = "" if option["name"] is None else f' = {{ name = "{option["name"]}" }}'
            console.print(f"\n{section}.{field['name']}{choice}: {option['summary']}")
            _print_fields(console, option["fields"])
    if "server" in entry:
        console.print(f"\nas it is, its server {entry['server']} (docs/privacy.md)")
    if "citation" in entry:
        console.print(f"\n{entry['citation']}")


def _print_fields(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("  field", "default", "meaning", "type"):
        table.add_column(heading, no_wrap=heading == "  field")
    for row in rows:
        table.add_row(f"  {row['name']}", _default(row), row["meaning"], row["type"])
    console.print(table)
    if tuned := [f"{row['name']} {row['search']}" for row in rows if row["search"] is not None]:
        console.print(f"  tuned (descant compare --tune): {', '.join(tuned)}")


def _default(row: dict[str, Any]) -> str:
    """The default as it would be written in the file: of a table, what differs from its own defaults."""
    value = row["default"]
    if isinstance(value, dict):
        [option] = [option for option in row["options"] if option["name"] == value.get("name")]
        usual = {field["name"]: field["default"] for field in option["fields"]}
        value = {key: item for key, item in value.items() if key not in usual or item != usual[key]}
    return "absent" if value is None else as_toml(value)
