from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from PIL import Image

from encoder_service.media.video import open_reader
from tools import demo_media


def test_the_pictures_are_pictures() -> None:
    assert Image.open(io.BytesIO(demo_media.photograph())).size == (451, 300)
    drawing = Image.open(io.BytesIO(demo_media.drawing()))
    assert drawing.size == (320, 224)
    assert drawing.getpixel((90, 112)) == (220, 50, 47)


def test_the_film_moves_from_left_to_right() -> None:
    frames = open_reader(demo_media.film())
    assert (len(frames), frames.get_avg_fps()) == (16, 8.0)
    centres = []
    for number in (0, 8, 15):
        green = frames[number].asnumpy()[80, :, 0] < 145  # the circle's red is 40, the ground's 250
        centres.append(green.nonzero()[0].mean())
    assert centres == sorted(centres)
    assert centres[-1] - centres[0] > 120


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_answers_shows_its_caches_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.demo"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = re.findall(r"^\[(.+)\] .+\n> (.+)$", done.stdout, re.MULTILINE)
    assert [title for title, _ in answers] == ["drawing", "film", "drawing again", "photo"]
    assert answers[0][1] == answers[2][1]
    assert "red circle" in answers[0][1]
    assert done.stdout.index("outside the demo model's world") < done.stdout.index("[photo]")
    assert re.search(r"[1-9]\d* of \d+ prompt tokens came from cache, the encoder ran 0 more ViT passes", done.stdout)
    assert "both services have stopped" in done.stdout
    assert done.stdout.splitlines()[-1] == "make up     # then open http://127.0.0.1:8000/"
