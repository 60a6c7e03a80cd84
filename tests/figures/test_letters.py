"""Names in any script: a font of the machine is looked for, and where none has their letters it is told."""

import warnings
from pathlib import Path

import pytest
from matplotlib import font_manager

from adaecho.figures import style
from adaecho.figures.arms import _colours
from adaecho.figures.style import SERIES, VARIANTS, figure


def draw(text: str) -> list[str]:
    """The fonts that a text is drawn with."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with figure(2, Path("drawn.png")) as drawing:
            drawn = drawing.text(0.5, 0.5, text)
    assert Path("drawn.png").exists()
    return list(drawn.get_fontfamily())


def test_a_font_that_has_the_letters_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    own = style._letters_of(font_manager.findfont("DejaVu Sans"))
    other = style._letters_of(font_manager.findfont("STIXGeneral"))
    letter = chr(min(other - own))  # both come with matplotlib
    fonts = draw(f"plain {letter}")
    assert fonts[0] == "DejaVu Sans"
    assert any(ord(letter) in style._letters_of(font_manager.findfont(font)) for font in fonts[1:])
    assert draw("plain, caf\u00e9, \u043a\u043e\u0442") == ["DejaVu Sans"]
    assert not capsys.readouterr().err


def test_where_no_font_has_them_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [entry for entry in font_manager.fontManager.ttflist if entry.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    style._fonts_with.cache_clear()
    with figure(2, Path("drawn.png"), title="\u732b") as drawing:
        drawing.text(0.5, 0.5, "a \u732b")
    style._fonts_with.cache_clear()
    told = capsys.readouterr().err
    assert told.count("no font here has \u732b, as in ") == 1
    assert "drawn as boxes; install one" in told


def test_a_colour_means_the_same_in_every_figure() -> None:
    """Of the arms of experiment=my_text the curves are drawn in their variants' colours, too."""
    kinds = {"baseline": "none", "batch_e2": "batch", "example_e2": "example", "example_e4": "example"}
    arms = [{"arm": arm, "echo_variant": variant} for arm, variant in kinds.items()]
    assert _colours(arms) == {arm: VARIANTS[variant][1] for arm, variant in kinds.items()}
    assert not {*SERIES} & {colour for _, colour in VARIANTS.values()}
    methods = [{"arm": arm, "echo_variant": "none"} for arm in ("s1", "s2_linear", "s2_adascale")]
    assert {*_colours(methods).values()} <= {*SERIES, style.INK}
