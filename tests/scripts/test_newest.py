"""scripts/newest.py: pip's report becomes the constraints' form."""

from pathlib import Path

from scripts.newest import constraints

ROOT = Path(__file__).resolve().parents[2]


def test_a_report_becomes_sorted_pins_without_what_torch_brings() -> None:
    names = ("torch", "Jinja2", "nvidia-cublas", "nvidia-nvimgcodec-cu13", "cuda-bindings", "triton")
    report = {"install": [{"metadata": {"name": name, "version": "1"}} for name in (*names, "adaecho")]}
    lines = constraints(report).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "Jinja2==1",
        "nvidia-nvimgcodec-cu13==1",
        "torch==1",
    ]


def test_the_committed_file_has_this_form() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = [line.split("==") for line in text.splitlines() if not line.startswith("#")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in pins]}
    assert constraints(report) == text
