"""The README keeps its word: its plan is what is printed, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import galv

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = (
    "$ galv plan configs/models/llama-3-8b.json --cluster h100-sxm-80:8x1 --seq-len 8192 --global-batch 64 \\\n"
    "      --require pp=1 -o plan.json"
)


def shown_plan() -> str:
    """The plan that the README shows."""
    return README.split(COMMAND)[1].split("```")[0].strip()


def without_seconds(text: str) -> str:
    """The plan without how long the search took."""
    return re.sub(r"layouts in [\d.]+ s", "layouts in a while", text)


def test_the_printed_plan_is_real(update_golden: bool) -> None:
    """The README's first example prints what galv prints; `pytest --update-golden` rewrites it."""
    model = str(ROOT / "configs" / "models" / "llama-3-8b.json")
    printed = str(galv.plan(model, cluster="h100-sxm-80:8x1", seq_len=8192, global_batch=64, require=["pp=1"]))
    if update_golden:
        (ROOT / "README.md").write_text(README.replace(shown_plan(), printed), encoding="utf-8")
        return

    assert without_seconds(shown_plan()) == without_seconds(printed)


def test_links_and_files_exist() -> None:
    """Every file that the README links to is there."""
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)

    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_tree_names_real_files() -> None:
    """Every file named in the annotated tree exists somewhere in the project."""
    tree = README.split("## The tree")[1].split("```")[1]
    names = re.findall(r"\b([a-z_]+\.py)\b", tree)

    assert names
    assert [name for name in names if not any(ROOT.glob(f"galv/**/{name}")) and not any(ROOT.glob(f"*/{name}"))] == []
