"""The picture of the README: one seed painted eagerly and through replayed graphs.

    python benchmarks/replay_picture.py --out docs/replay.png

Both pictures come from the built-in tiny pipeline (random weights, so the picture is noise with
structure); the third shows where they differ, every difference as white.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageChops, ImageDraw, ImageFont

from bcg_core import enable
from bcg_core.models.tiny import tiny_pipeline

SIZE, BAR, GAP = 256, 34, 12


def paint(pipe: Any, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    picture: Image.Image = pipe(
        "a lighthouse on a cliff at dawn",
        height=SIZE,
        width=SIZE,
        num_inference_steps=8,
        generator=generator,
    ).images[0]
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    eager = paint(pipe, options.seed)
    with enable(pipe, breaks="attention", backend="simulated") as session:
        replayed = paint(pipe, options.seed)
        stats = session.stats
    difference = ImageChops.difference(eager, replayed).point(lambda v: 255 if v else 0)
    differing = sum(difference.convert("L").histogram()[1:])
    titles = (
        (eager, "eager"),
        (replayed, f"{stats.segments} segments, {stats.breaks} breaks, {stats.replays} replays"),
        (difference, f"pixels that differ: {differing}"),
    )
    sheet = Image.new("RGB", (3 * SIZE + 4 * GAP, SIZE + BAR + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, title) in enumerate(titles):
        left = GAP + number * (SIZE + GAP)
        draw.text((left, 9), title, fill="black", font=ImageFont.load_default(15))
        sheet.paste(picture, (left, BAR))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.out, optimize=True)
    print(f"{options.out}: {differing} pixels differ, {stats.replays} replays")


if __name__ == "__main__":
    main()
